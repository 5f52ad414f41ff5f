"""What `make check` looks at: the files that changed, and the tests that are nearest to them.

Owns the map from a file to tests: a test to itself, a Python file to the tests that import it or
start it, a folder of hsgd/csrc to the native programs that include its headers, both to tests of
their own name, and a page to the build of the site. Changed is what differs from where the branch
left origin/main (without such a branch: from HEAD), and what git does not know yet. Leaves to
`make test` whatever reaches a file through others. Never runs a test.

    python tests/changed.py pytest|native|python|cpp    prints names, one a line
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["changed_files", "native_programs", "python_tests"]

ROOT = Path(__file__).resolve().parents[1]
TESTS, NATIVE, CSRC = ROOT / "tests", ROOT / "tests/native", ROOT / "hsgd/csrc"
ALWAYS = {"test_architecture", "test_sources"}
PAGES = {ROOT / "docs", ROOT / ".ci/site", ROOT / "mkdocs.yml", ROOT / "README.md"}
MOST_TESTS = 8  # that use one file; where more do, its own test stands for them
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
    """Files for pytest, the nearest first: what changed, tests of its name, tests that use it."""
    uses = {path: _uses(path) for path in sorted(TESTS.rglob("test_*.py"))}
    found = uses.keys() & set(files)
    named = ALWAYS | {f"test_{room}" for room in _rooms(files)}
    if any(PAGES & {path, *path.parents} for path in files):
        named |= {"test_site"}
    for path in files:
        if path.suffix != ".py" or path in uses:
            continue
        users = {test for test, names in uses.items() if names & _names(path)}
        if len(users) <= MOST_TESTS:
            found |= users
        else:
            print(f"{path.name}: {len(users)} tests use it, make test runs them", file=sys.stderr)
        above = path.relative_to(ROOT).parts[:-1]
        named |= {f"test_{path.stem}", *(f"test_{folder}_{path.stem}" for folder in above)}
    own = {path for path in uses if path.stem in named}
    return sorted(found | own, key=lambda path: (path not in files, path not in own, path))


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
