"""The worked changes of docs/internals/worked_changes.md: each in a copy of the sources, with its
tests.

Owns the copies. Never changes the sources themselves.

    python tests/worked_changes.py    all of them, in build/worked_changes
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = [
    "PATCHES",
    "ROOT",
    "added_tests",
    "changed_files",
    "copy_sources",
    "is_native",
    "try_out",
]

ROOT = Path(__file__).resolve().parents[1]
PATCHES = sorted((ROOT / "docs/internals/worked_changes").glob("*.patch"))
LIMIT_S = 600.0  # of one command


def changed_files(patch: Path) -> list[str]:
    """The files that a patch changes or adds."""
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)


def is_native(patch: Path) -> bool:
    """Whether there is something to build."""
    return any(Path(name).suffix in {".cpp", ".hpp", ".h"} for name in changed_files(patch))


def added_tests(patch: Path) -> list[str]:
    """The files of tests that a patch adds."""
    found = re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)
    return [name for name in found if Path(name).name.startswith("test_")]


def copy_sources(folder: Path) -> None:
    """What the tests need, with the libraries that are built."""
    skip = shutil.ignore_patterns("__pycache__", "*.ipynb")
    for name in ("hsgd", "io", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, folder / name)
    (folder / "hsgd/io").symlink_to("../io")  # the installed package leads to the sources


def run(command: list[str], folder: Path) -> str:
    """What a command in the copy prints; RuntimeError with it where the command fails."""
    # Below a repository git would look for the files there; pytest would find the sources.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} in {folder}:\n{done.stdout[-3000:]}")
    return done.stdout


def build(folder: Path) -> None:
    """The libraries of a copy, from nothing: two minutes of processor time."""
    (folder / "build").mkdir()
    if (ROOT / "build/mpi").exists():
        (folder / "build/mpi").symlink_to(ROOT / "build/mpi")
    (folder / "hsgd/io").unlink()  # setup.py has another way to it
    run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], folder)
    (folder / "hsgd/io").symlink_to("../io")


def try_out(patch: Path, folder: Path) -> str:
    """Apply a patch to a copy of the sources in `folder`, and run the tests that it adds; what
    pytest prints. Raises RuntimeError where that fails.
    """
    copy_sources(folder)
    run(["git", "apply", str(patch)], folder)
    if is_native(patch):
        build(folder)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return run([*pytest, *added_tests(patch)], folder)


def main() -> None:
    """All patches, one after the other."""
    below = ROOT / "build/worked_changes"
    shutil.rmtree(below, ignore_errors=True)
    for patch in PATCHES:
        print(f"{patch.stem}: {try_out(patch, below / patch.stem).splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
