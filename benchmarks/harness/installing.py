"""What is installed once into hsgd's cache: folders, and the programs that fill them.

The environment that benchmarks run in stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hsgd.jobs.launch.horovod_wheel import cache_folder

__all__ = ["PeerMissing", "made_once", "pip", "run", "telling_line"]


class PeerMissing(RuntimeError):
    """A peer, or a program of others, cannot be had: one line saying which and why."""


@contextlib.contextmanager
def made_once(name: str, install: bool, kind: str = "peers") -> Iterator[tuple[Path, bool]]:
    """A folder of the cache and whether it must be filled: it counts as made when the block ends
    without an error. One process at a time. kind: the folder that it lies in. Raises PeerMissing.
    """
    cache = cache_folder(None).with_name(kind)
    folder, stamp = cache / name, cache / f"{name}.made"
    if stamp.exists():
        yield folder, False
        return
    if not install:
        raise PeerMissing("it is not there yet; --peers downloads it")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = not stamp.exists()
            if missing:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            yield folder, missing
            stamp.touch()
    except OSError as error:
        raise PeerMissing(f"{cache} cannot be used ({error})") from None


def run(
    what: str,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    limit_s: float = 600.0,
) -> None:
    """Run a program that installs something; its output is shown only where it fails. Raises
    PeerMissing.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"{what}: {words[0]} took more than {limit_s:g} s") from None
    except OSError as error:
        raise PeerMissing(f"{what}: {words[0]} does not run ({error})") from None
    if done.returncode != 0:
        raise PeerMissing(f"{what}: {telling_line(done.stdout)}")


def pip(what: str, words: Sequence[str], python: Path | str = sys.executable, **more: Any) -> None:
    """Run pip of an environment; `more` as of run(). Raises PeerMissing."""
    run(what, [str(python), "-m", "pip", "--disable-pip-version-check", *words], **more)


def telling_line(text: str) -> str:
    """The line of an output that most likely says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
    errors = [line for line in lines if "error" in line.lower() or "cannot" in line]
    return (errors or lines or [""])[-1]
