"""Virtual environments of the programs, one for each list of requirements, with hsgd of this tree.

Owns the folder "frameworks" in hsgd's cache. Never changes the environment that this runs in.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsgd.launch.horovod_wheel import cache_folder

__all__ = ["Failure", "cache", "environment", "wheel"]

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S = 1800
# Beside requirements.txt: what to take without what it asks for, and what to take away again,
# because it was built for another torch and is not needed.
WITHOUT_DEPENDENCIES = "no-deps.txt"
UNWANTED = "unwanted.txt"


class Failure(RuntimeError):
    """A program cannot be installed or does not run: one line, with the file that has the rest."""


def cache() -> Path:
    """hsgd's cache has a folder for all of this."""
    return cache_folder(None).with_name("frameworks")


def wheel() -> Path:
    """hsgd as it lies here, built by the environment that this runs in."""
    target = cache() / "wheel"
    with _one_at_a_time("wheel"):
        shutil.rmtree(target, ignore_errors=True)
        words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
        _pip(Path(sys.executable), [*words, str(ROOT)], cache() / "wheel.log")
        return next(target.glob("hsgd-*.whl"))


def environment(folder: Path, hsgd: Path) -> Path:
    """The folder of the programs of an environment with what `folder` requires, and the wheel.

    Made at the first call; programs with the same requirements share one.
    """
    names = ("requirements.txt", WITHOUT_DEPENDENCIES, UNWANTED)
    lists = {name: folder / name for name in names if (folder / name).exists()}
    text = "".join(f"{name}\n{path.read_text()}" for name, path in lists.items())
    tag = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    place = cache() / tag
    python, made, log = place / "bin" / "python", place / "made", cache() / f"{folder.name}.log"
    with _one_at_a_time(tag):
        if not made.exists():
            print(f"{folder.name}: installing once, into {place}", file=sys.stderr)
            _make(place, lists, log)
            made.touch()
        words = ["install", "--force-reinstall", "--no-deps", str(hsgd)]
        _pip(python, words, cache() / f"{folder.name}-hsgd.log")
    return place / "bin"


def _make(place: Path, lists: dict[str, Path], log: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(place)], log)
    python = place / "bin" / "python"
    _pip(python, ["install", "tqdm", "-r", str(lists["requirements.txt"])], log)
    if WITHOUT_DEPENDENCIES in lists:
        _pip(python, ["install", "--no-deps", "-r", str(lists[WITHOUT_DEPENDENCIES])], log)
    if UNWANTED in lists:
        _pip(python, ["uninstall", "--yes", "-r", str(lists[UNWANTED])], log)


def _pip(python: Path, words: Sequence[str], log: Path) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *words], log)


def _run(words: Sequence[str], log: Path) -> None:
    with log.open("w") as out:
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"installing took more than {INSTALL_LIMIT_S} s; see {log}") from None
    if done.returncode:
        raise Failure(f"installing failed; see {log}")


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
