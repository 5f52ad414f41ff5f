"""What `make check` looks at: the files that changed, and the tests that are nearest to them.

Owns the map from a file to tests: a test to itself, a source to tests of its name, to those that
import or start it, and to those whose text is most like its own (cosine of tf-idf weights of words:
Manning, Raghavan, Schuetze, "Introduction to Information Retrieval", chapter 6); a folder of
hsgd/csrc to the native programs that include its headers; a page to the build of the site. Changed
is what differs from where the branch left origin/main (without such a branch: from HEAD), and what
git does not know yet. Never runs a test.

    python tests/changed.py pytest|native|python|cpp    prints names, one a line
"""

from __future__ import annotations

import ast
import functools
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

__all__ = ["changed_files", "native_programs", "python_tests"]

ROOT = Path(__file__).resolve().parents[1]
TESTS, NATIVE, CSRC = ROOT / "tests", ROOT / "tests/native", ROOT / "hsgd/csrc"
ALWAYS = {"test_architecture", "test_sources"}
PAGES = {ROOT / "docs", ROOT / ".ci/site", ROOT / "mkdocs.yml", ROOT / "README.md"}
MOST_TESTS = 10  # nearest to one file
MOST_ROOMS = 3  # of hsgd/csrc; beyond, all native programs
SUFFIXES = {"python": (".py", ".pyi"), "cpp": (".c", ".cpp", ".h", ".hpp")}


def changed_files() -> list[Path]:
    """Files that were added, changed or removed."""
    try:
        (base,) = _git("merge-base", "HEAD", "origin/main")
    except subprocess.CalledProcessError:
        base = "HEAD"
    names = _git("diff", "--name-only", "--no-renames", base)
    return [ROOT / name for name in sorted({*names, *_git("ls-files", "-o", "--exclude-standard")})]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def python_tests(files: Sequence[Path]) -> list[Path]:
    """Files for pytest, the nearest first: what changed, tests of its name, the most alike, with
    those that import it before others.
    """
    tests = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    named = ALWAYS | {f"test_{room}" for room in _rooms(files)}
    if any(PAGES & {path, *path.parents} for path in files):
        named |= {"test_site", "test_docs"}
    named |= {"test_readme"} if ROOT / "README.md" in files else set()
    named |= {"test_worked_changes"} if any(path.suffix == ".patch" for path in files) else set()
    weigh = _weights(tests.values())
    weights = {test: weigh(text) for test, text in tests.items()}
    near: dict[Path, float] = {}
    for path in files:
        above = path.relative_to(ROOT).parts[:-1]
        named |= {f"test_{path.stem}", *(f"test_{folder}_{path.stem}" for folder in above)}
        named |= {test.stem for test in tests if path.stem.startswith(test.stem[5:] or " ")}
        if path in tests or path.suffix not in {".py", *SUFFIXES["cpp"]} or not path.is_file():
            continue
        names, own = _names(path), weigh(f"{path.relative_to(ROOT)} {path.read_text()}")
        likes = {
            test: sum(weight * theirs.get(word, 0.0) for word, weight in own.items())
            + (path.suffix == ".py" and bool(names & _uses(test)))
            for test, theirs in weights.items()
        }
        for test in sorted(likes, key=likes.__getitem__)[-MOST_TESTS:]:
            near[test] = max(near.get(test, 0.0), likes[test])
    chosen = [test for test in tests if test in {*files, *near} or test.stem in named]
    return sorted(
        chosen, key=lambda test: (test not in files, test.stem not in named, -near.get(test, 0.0))
    )


def _weights(texts: Collection[str]) -> Callable[[str], dict[str, float]]:
    """From a text to a vector of length 1 that weighs its words: more if it has them often, less if
    many of `texts` have them.
    """
    found = Counter(word for text in texts for word in set(_words(text)))

    def weigh(text: str) -> dict[str, float]:
        raw = {
            word: (1 + math.log(count)) * math.log(len(texts) / found[word])
            for word, count in Counter(_words(text)).items()
            if word in found
        }
        length = math.hypot(*raw.values()) or 1.0
        return {word: weight / length for word, weight in raw.items()}

    return weigh


def _words(text: str) -> list[str]:
    """The words of prose and of names, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Za-z][a-z]{2,}|[A-Z]{3,}", text)]


def _names(path: Path) -> set[str]:
    """What a test calls a Python file, and what it may import of it from the packages above."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    if folder not in ("hsgd", "io"):
        return {path.stem, ".".join(rest)}
    parts = ["hsgd", *(["io"] if folder == "io" else []), *rest]
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    public = re.search(r"__all__[^=]*= \[(.*?)\]", path.read_text() if path.exists() else "", re.S)
    exports = re.findall(r'"(\w+)"', public[1]) if public else []
    above = [".".join(parts[:end]) for end in range(1, len(parts))]
    return {".".join(parts), *(f"{package}.{name}" for package in above for name in exports)}


@functools.cache
def _uses(path: Path) -> set[str]:
    """Modules and names that a test imports, and programs that it names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and str(node.value).endswith(".py"):
            names.add(Path(str(node.value)).stem)
    return names


def native_programs(files: Sequence[Path]) -> list[str]:
    """Programs of tests/native, without suffix."""
    programs = sorted(NATIVE.rglob("test_*.cpp"))
    rooms = _rooms(files)
    if len(rooms) > MOST_ROOMS or "include" in rooms:
        return [path.stem for path in programs]
    changed = rooms | {path.stem for path in files if NATIVE in path.parents}
    kin = {path: {path.stem, path.parent.name, *_included(path)} for path in programs}
    return [path.stem for path in programs if changed & kin[path]]


def _rooms(files: Sequence[Path]) -> set[str]:
    """Folders of hsgd/csrc."""
    return {path.parent.name for path in files if CSRC in path.parents}


def _included(path: Path) -> set[str]:
    """Folders of the headers that a native test includes, its own headers, and what these include.
    The C interface stands for bindings/c, which implements it.
    """
    found: set[str] = set()
    for name in re.findall(r'#include "([^"]+)"', path.read_text()):
        if (NATIVE / name).is_file():
            found |= {Path(name).stem, *_included(NATIVE / name)}
        else:
            found.add("c" if name == "hsgd_core.h" else Path(name).parent.name)
    return found


def main() -> None:
    """Print what is asked for."""
    what, files = sys.argv[1], changed_files()
    kept = [path for path in files if path.is_file() and path.suffix in SUFFIXES.get(what, ())]
    paths = python_tests(files) if what == "pytest" else kept
    names = [path.relative_to(ROOT) for path in paths]
    print(*(native_programs(files) if what == "native" else names), sep="\n")


if __name__ == "__main__":
    main()
