"""Virtual environments of the programs, one for each list of requirements, with hsgd of this tree.
The environment that this runs in stays as it is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import installing
from harness.rank_command import BENCHMARKS

__all__ = ["FOLDER", "environment", "wheel"]

FOLDER = "frameworks"  # in hsgd's cache
INSTALL_LIMIT_S = 1800.0
# Beside requirements.txt: what to take without what it asks for, and what to take away again,
# because it was built for another torch and is not needed.
WITHOUT_DEPENDENCIES = "no-deps.txt"
UNWANTED = "unwanted.txt"


def wheel(target: Path) -> Path:
    """hsgd as it lies here, built into `target` by the environment that this runs in. Raises
    PeerMissing.
    """
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    _pip("hsgd", Path(sys.executable), [*words, str(BENCHMARKS.parent)])
    return next(target.glob("hsgd-*.whl"))


def environment(folder: Path, hsgd: Path) -> Path:
    """The folder of the programs of an environment with what `folder` requires, and the wheel.

    Made at the first call; programs with the same requirements share one. Raises PeerMissing.
    """
    names = ("requirements.txt", WITHOUT_DEPENDENCIES, UNWANTED)
    lists = {name: folder / name for name in names if (folder / name).exists()}
    text = "".join(f"{name}\n{path.read_text()}" for name, path in lists.items())
    tag = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    with installing.made_once(tag, install=True, kind=FOLDER) as (place, missing):
        if missing:
            print(f"{folder.name}: installing once, into {place}", file=sys.stderr)
            _fill(folder.name, place, lists)
    words = ["install", "--force-reinstall", "--no-deps", str(hsgd)]
    _pip(folder.name, place / "bin" / "python", words)
    return place / "bin"


def _fill(what: str, place: Path, lists: dict[str, Path]) -> None:
    installing.run(what, [sys.executable, "-m", "venv", str(place)])
    python = place / "bin" / "python"
    _pip(what, python, ["install", "tqdm", "-r", str(lists["requirements.txt"])])
    if WITHOUT_DEPENDENCIES in lists:
        _pip(what, python, ["install", "--no-deps", "-r", str(lists[WITHOUT_DEPENDENCIES])])
    if UNWANTED in lists:
        _pip(what, python, ["uninstall", "--yes", "-r", str(lists[UNWANTED])])


def _pip(what: str, python: Path, words: Sequence[str]) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    installing.run(what, [*pip, *words], limit_s=INSTALL_LIMIT_S)
