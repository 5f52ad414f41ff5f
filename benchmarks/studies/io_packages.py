"""The packages of the peers of hsgd.io: what they need, where they come from, whether they work.

Pip puts, once, into a folder of hsgd's cache for each package that the environment does not have
what is named here and nothing that it asks for besides, so torch and NumPy stay what they are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import site
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from harness import installing

__all__ = [
    "PACKAGES",
    "Candidate",
    "Package",
    "import_streaming",
    "leave_out",
    "reason_against",
    "usable",
]


PACKAGE_OF_FILES = {  # that files of a kind need
    "tar": "webdataset",
    "mds": "streaming",
    "packed": "hdf5plugin",
    "packed.h5": "hdf5plugin",
    "litdata": "litdata",
    "records": "grain",
    "zarr": "tensorstore",
    "zarr-rows": "tensorstore",
}


@dataclass(frozen=True)
class Candidate:
    """One way to read. order: block (shuffled) or in-order; files: what it reads (io_files,
    image_files). variant: "" or what else is the same for those that are compared; packages: what
    reading needs besides what the files do.
    """

    name: str
    label: str
    kind: str  # hsgd, peer or limit
    order: str
    files: str
    read: Callable[..., Iterator[Any]]
    quick: bool = True  # part of --quick
    variant: str = ""
    packages: tuple[str, ...] = ()

    def needs(self) -> set[str]:
        """Packages that cannot be missing."""
        return {*self.packages, PACKAGE_OF_FILES.get(self.files, "")} - {""}


def usable(chosen: Sequence[Candidate], install: bool, left_out: dict[str, str]) -> list[Candidate]:
    """Those that can read here; packages that the others need go to `left_out`, with the reason."""
    # torchvision before streaming, which may replace it
    leave_out(sorted({p for each in chosen for p in each.needs()})[::-1], install, left_out)
    return [candidate for candidate in chosen if not candidate.needs() & left_out.keys()]


@dataclass(frozen=True)
class Package:
    """modules: what is imported; requirements: all that pip shall fetch, nothing where the package
    must be in the environment.
    """

    modules: tuple[str, ...]
    requirements: tuple[str, ...] = ()


PACKAGES = {
    "grain": Package(
        ("grain", "array_record.python.array_record_module"),
        ("grain==0.2.18", "array_record==0.8.6", "absl-py", "cloudpickle", "etils", "portpicker",
         "protobuf", "psutil", "fsspec", "importlib_resources", "zipp", "typing_extensions"),
    ),
    "h5coro": Package(("h5coro.h5coro",), ("h5coro==1.0.7",)),
    "hdf5plugin": Package(("hdf5plugin",)),
    "litdata": Package(
        ("litdata",),
        ("litdata==0.2.76", "lightning-utilities", "filelock", "packaging", "typing_extensions",
         "boto3", "botocore", "jmespath", "python-dateutil", "s3transfer", "six",
         "requests", "certifi", "charset-normalizer", "idna", "urllib3"),
    ),
    # opencv and torchvision: io_images.py alone.
    "opencv": Package(("cv2",), ("opencv-python-headless==5.0.0.93",)),
    "pyfive": Package(("pyfive",), ("pyfive==1.3.0", "fsspec", "numcodecs", "typing_extensions")),
    # of io_throughput.py --remote alone
    "s3fs": Package(
        ("s3fs",),
        ("s3fs==2026.9.0", "fsspec==2026.9.0", "aiobotocore==3.10.0", "aioitertools", "wrapt",
         "botocore==1.43.117", "jmespath", "python-dateutil", "six", "urllib3"),
    ),
    "spdl": Package(("spdl.pipeline",), ("spdl_core==0.8.0",)),
    "streaming": Package(
        ("streaming",),
        ("mosaicml-streaming==0.13.0", "brotli", "catalogue", "cramjam", "python-snappy", "regex",
         "safetensors", "transformers>=5.24", "xxhash", "zstd", "filelock", "boto3", "botocore",
         "jmespath", "python-dateutil", "s3transfer", "six", "urllib3"),
    ),
    "tensorstore": Package(("tensorstore",), ("tensorstore==0.1.86", "ml_dtypes")),
    # of torch 2.13, built with CUDA: torch for CPUs alone cannot load it
    "torchvision": Package(
        ("torchvision.io", "torchvision.transforms.v2"), ("torchvision==0.28.0",)
    ),
    "webdataset": Package(("webdataset",)),
}  # fmt: skip


@functools.cache
def reason_against(name: str, install: bool = False) -> str:
    """Why package `name` cannot be used here, in one line; "" where it can be. The first call
    decides; `install`: fetch it where it is not there yet.
    """
    package = PACKAGES[name]
    reason = _import(package)
    if reason and package.requirements:
        try:
            _fetch(name, package, install)
        except installing.PeerMissing as missing:
            return str(missing)
        importlib.invalidate_caches()
        reason = _import(package)
    return reason


def leave_out(names: Iterable[str], install: bool, left_out: dict[str, str]) -> None:
    """Put packages that cannot be used into `left_out`, with the reason, and tell it."""
    for name in names:
        if reason := reason_against(name, install):
            left_out[name] = reason
            print(f"left out: {name} ({reason})", file=sys.stderr)


def _import(package: Package) -> str:
    try:
        for module in package.modules:
            import_streaming() if module == "streaming" else importlib.import_module(module)
    except Exception as error:  # not installed, or not with what else is installed here
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _fetch(name: str, package: Package, install: bool) -> None:
    """Let Python find the package in its folder, after all that the environment has. Raises
    PeerMissing.
    """
    words = " ".join((sys.version, *package.requirements))
    tag = hashlib.sha256(words.encode()).hexdigest()[:12]
    with installing.made_once(f"{name}-{tag}", install) as (folder, missing):
        if missing:
            print(f"installing {name}, once, into {folder}", file=sys.stderr)
            words = ["install", "--quiet", "--no-deps", "--target", str(folder)]
            installing.pip(name, [*words, *package.requirements])
    site.addsitedir(str(folder))


def import_streaming() -> Any:
    """The package `streaming`, with stand-ins where torchvision was built for another torch: it
    wants that for images, which are not read here.
    """
    try:
        importlib.import_module("torchvision.transforms.functional")
    except (ImportError, RuntimeError):
        names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
        for name in (*names, "torchvision.datasets"):
            sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None))
        vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
    return importlib.import_module("streaming")
