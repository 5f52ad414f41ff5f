"""Compiles the simulated CUDA driver and the simulated NCCL: python simcuda_build.py [FOLDER].

Owns the compiler's command and when it runs. Several processes may build into one folder at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["FOLDER", "build"]

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "simcuda"
FLAGS = (
    "-std=c++17 -O2 -Wall -Wextra -Werror -fPIC -shared -pthread -fvisibility=hidden"
    " -Wl,-z,defs -Wl,-z,nodelete"
)
LIMIT_S = 300.0  # of one library, on a busy machine


def build(folder: Path = FOLDER, sanitize: str = "") -> tuple[Path, Path]:
    """libsimcuda.so and libsimnccl.so in a folder, made unless those there are of these sources.

    `sanitize`: a value of -fsanitize=; use another folder for each. The names libcuda.so.1 and
    libnccl.so.2 lead to them too, for programs that load those. Raises RuntimeError with the
    compiler's words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = folder / "libsimcuda.so", folder / "libsimnccl.so"
    command = [*(os.environ.get("CXX") or "g++").split(), *FLAGS.split()]
    if sanitize:
        command += [f"-fsanitize={sanitize}", "-g"]
    state = _state(command)
    stamp = folder / "simcuda.sha256"
    with (folder / "simcuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = stamp.exists() and stamp.read_text() == state
        if not fresh or not all(library.exists() for library in libraries):
            stamp.unlink(missing_ok=True)
            _compile(command, "driver", libraries[0], [])
            beside = ["-L", str(folder), "-lsimcuda", "-Wl,-rpath,$ORIGIN"]
            _compile(command, "nccl", libraries[1], beside)
            _link(folder / "libcuda.so.1", libraries[0].name)
            _link(folder / "libnccl.so.2", libraries[1].name)
            stamp.write_text(state)
    return libraries


def _state(command: list[str]) -> str:
    """Changes with the command and with each source."""
    digest = hashlib.sha256(" ".join(command).encode())
    for path in sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.hpp")]):
        digest.update(path.relative_to(HERE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(command: list[str], part: str, library: Path, more: list[str]) -> None:
    """Programs that have the library loaded keep theirs: the file is replaced, not written to."""
    fresh = library.with_suffix(f".{os.getpid()}")
    sources = [str(path) for path in sorted((HERE / part).glob("*.cpp"))]
    names = ["-o", str(fresh), f"-Wl,-soname,{library.name}"]
    run = subprocess.run(
        [*command, *sources, *names, *more], capture_output=True, text=True, timeout=LIMIT_S
    )
    if run.returncode != 0:
        fresh.unlink(missing_ok=True)
        raise RuntimeError(f"compiling {library.name}: {run.stderr}")
    fresh.replace(library)


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


if __name__ == "__main__":
    for made in build(Path(sys.argv[1]) if sys.argv[1:] else FOLDER):
        print(made)
