"""Sizes and names of the sources: what makes them easy to find and to read.

Owns the bounds, and the exceptions from them, which are to become fewer: one that is no longer
needed fails here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from worked_changes import PATCHES, changed_files

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
CODE = {".py", ".cpp", ".hpp", ".h", ".c"}
MOST_FILES = 20  # sources in a folder
MOST_LINES = 500  # of a file
LONG_FILES = {
    "hsgd/comm/communicator.py",
    "hsgd/csrc/network/tcp_window/rma.cpp",
    "hsgd/optim/gossip/pair_averaging.py",
    "hsgd/optim/notified_tree/notified_tree_optimizer.py",
}
MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS = {
    "hsgd/torch/optimizer.py:DistributedOptimizer",
    "io/convert/convert_to_slabs.py:convert_to_slabs",
}
MOST_PARAMETERS = 8
MANY_PARAMETERS = {
    "hsgd/optim/diloco/diloco_optimizer.py:__init__",
    "hsgd/optim/elastic_averaging/easgd_optimizer.py:__init__",
    "hsgd/optim/gossip/gossip_optimizer.py:__init__",
    "hsgd/optim/large_batch/lars.py:__init__",
    "hsgd/optim/notified_tree/notified_tree_optimizer.py:__init__",
    "hsgd/torch/optimizer.py:DistributedOptimizer",
    "hsgd/onesided/notified_window.py:__init__",
    "io/convert/convert_to_slabs.py:convert_to_slabs",
    "io/convert/slab_folder_writer.py:__init__",
    "io/loader.py:__init__",
}
SAME_STEMS = {"cli"}  # hsgd, and hsgd data
# Files that pages and comments name and that are not of this project, or made by a test or for the
# site.
ELSEWHERE = re.compile(
    r"(?:Python|mpi|mpif|ext|extension|types)\.h|crc32c\.c|shm\.cpp|nb_combined\.cpp|pan\.c"
    r"|(?:LARC|lars|lars_optimizer|mpi_run|sitecustomize|train|script|program|main|execute)\.py"
    r"|hsgd_horovod_hook\.py|empty\.c|stand_in\.c|allreduce\.c"
    r"|(?:benchmarks|changelog|cli|contributing|settings)\.md"
    r"|(?:both|count|killed|late|locality|sum|together|hsgd_command)\.py"
)


def tracked() -> list[str]:
    """Files of the project: those that git knows, or, in an archive, all in its folders."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    folders = ("hsgd", "io", "tests", "benchmarks", "examples", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in paths if path.suffix in CODE | {".md"}]


FILES = tracked()
SOURCES = [name for name in FILES if Path(name).suffix in CODE]
PRODUCT = [name for name in SOURCES if name.startswith(("hsgd/", "io/"))]
TREES = {name: ast.parse((ROOT / name).read_text()) for name in PRODUCT if name.endswith(".py")}
FUNCTIONS = [
    (name, node)
    for name, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def test_folders_hold_few_sources() -> None:
    counts = Counter(str(Path(name).parent) for name in SOURCES)
    assert not {folder for folder, count in counts.items() if count > MOST_FILES}


def test_files_are_short() -> None:
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in PRODUCT}
    assert {name for name, count in lines.items() if count > MOST_LINES} == LONG_FILES


def test_functions_are_short() -> None:
    found = {
        f"{name}:{node.name}"
        for name, node in FUNCTIONS
        if (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS


def test_functions_have_few_parameters() -> None:
    found = set()
    for name, node in FUNCTIONS:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = [each for each in given if each.arg not in ("self", "cls")]
        if len(own) > MOST_PARAMETERS:
            found.add(f"{name}:{node.name}")
    assert found == MANY_PARAMETERS


def test_a_module_is_known_by_its_last_name() -> None:
    homes = defaultdict(list)
    for name in TREES:
        homes[Path(name).stem].append(name)
    for of_python in ("__init__", "__main__"):
        del homes[of_python]
    assert {stem for stem, names in homes.items() if len(names) > 1} == SAME_STEMS


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Those outside packages lie on one path: of two with one name a test would get the first."""
    homes = defaultdict(list)
    for path in (ROOT / "tests").rglob("*.py"):
        if not {"toolkit", "campaigns"} & {*path.parts}:
            homes[path.name].append(path)
    for of_python in ("__init__.py", "conftest.py"):
        homes.pop(of_python, None)
    assert {name for name, paths in homes.items() if len(paths) > 1} == set()


def test_private_names_stay_in_their_module() -> None:
    found = {
        (name, alias.name)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").startswith("hsgd"))
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "_native"
    }
    assert found == set()


def test_the_product_and_the_benchmarks_leave_the_path_of_python_alone() -> None:
    """But for one line, by which benchmarks find the virtual nodes of tests/toolkit."""
    programs = [name for name in SOURCES if name.startswith(("hsgd/", "io/", "benchmarks/"))]
    found = [name for name in programs if "sys.path" in (ROOT / name).read_text()]
    assert found == ["benchmarks/harness/__init__.py"]


def test_messages_name_packages_that_can_be_installed() -> None:
    """hsgd is on no index: `pip install 'hsgd[io]'` fails where it is meant to help."""
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name in PRODUCT
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if re.search(r"hsgd\[\w+\]|pip install(?: -[\w-]+)* '?hsgd\b", line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", [".md", ".py", ".hpp", ".cpp", ".h", ".c"])
def test_files_that_are_named_exist(kind: str) -> None:
    known = [*FILES, *(name for patch in PATCHES for name in changed_files(patch))]
    ends = {"/".join(Path(name).parts[k:]) for name in known for k in range(len(Path(name).parts))}
    pattern = re.compile(
        r"(?<![\w./{}$%*<-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|hpp|md|c|h))\b(?![\w(/.*-])"
    )
    missing = []
    for name in FILES:
        if Path(name).suffix != kind:
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            for word in pattern.findall(line):
                if word not in ends and not ELSEWHERE.fullmatch(Path(word).name):
                    missing.append(f"{name}:{number}: {word}")
    assert not missing, "\n".join(missing)
