"""mpi4py's own tests pass with the interposer preloaded.

They come with its source distribution, kept in the cache folder of hsgd for the next time. Only
the modules that call collectives, or look closely at communicators, attributes and errors.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd.jobs.launch import preload
from hsgd.jobs.launch.horovod_wheel import cache_folder
from mpi_programs import taken_by_rank
from other_mpis import InstalledMpi, install_mpi
from tiers import short_form
from toolkit.pip_download import pip_download

__all__: list[str] = []

pytestmark = pytest.mark.long

RANKS = 4
MODULES = (
    *("test_op", "test_cco_buf", "test_cco_vec", "test_cco_obj"),
    *("test_cco_buf_inter", "test_cco_vec_inter", "test_cco_obj_inter"),
    *("test_comm", "test_attributes", "test_errhandler", "test_threads"),
)
# Where almost everything passes through, less can go wrong.
FEW = ("test_op", "test_cco_buf", "test_comm", "test_attributes", "test_errhandler")
LIMIT_S = 240.0

Run = Callable[..., subprocess.CompletedProcess[str]]


def source_archive() -> Path:
    """The source distribution of the installed mpi4py, from the cache or through pip."""
    version = importlib.metadata.version("mpi4py")
    folder = cache_folder(None).parent / "mpi4py"
    archive = folder / f"mpi4py-{version}.tar.gz"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            words = ("--no-build-isolation", "--no-binary", "mpi4py", f"mpi4py=={version}")
            pip_download(Path(scratch), *words)
            os.replace(Path(scratch, archive.name), archive)
    return archive


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mpi4py")
    with tarfile.open(source_archive()) as archive:
        # Python has it from 3.10.12 and 3.11.4 on.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safely)
    (script,) = folder.glob("*/test/main.py")
    return script


def failures(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The tests of mpi4py that failed on some rank; all ranks have come to their end."""
    lines = done.stderr.splitlines()
    ends = [line for line in lines if re.match(r"(OK|FAILED)\b", line)]
    assert len(ends) == RANKS, done.stderr[-6000:]
    return {line for line in lines if re.match(r"(FAIL|ERROR): ", line)}


def apart(
    mpi: InstalledMpi, folder: Path, *words: str | Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """A run whose ranks write stderr to files of their own: Hydra mixes their lines."""
    folder.mkdir()
    shell = ("sh", "-c", f'exec "$@" 2> {folder}/$PMI_RANK', "sh")
    done = mpi.run(RANKS, *shell, *words, **env)
    stderr = "".join(one.read_text() for one in sorted(folder.iterdir()))
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, stderr)


@pytest.mark.suites
@pytest.mark.parametrize("name", ["mpich", "intel"])
def test_the_verdicts_over_another_mpi_are_the_same(name: str, suite: Path, tmp_path: Path) -> None:
    mpi = install_mpi(name, tmp_path / name)
    words = (sys.executable, suite, "-q", *MODULES)
    alone = failures(apart(mpi, tmp_path / "alone", *words))
    env = {"LD_PRELOAD": str(preload.library(mpi.abi)), "HSGD_REPORT": "1", "HSGD_MIN_BYTES": "0"}
    done = apart(mpi, tmp_path / "interposed", *words, **env)
    assert failures(done) == alone
    taken = taken_by_rank(done)
    assert len(taken) == RANKS and all(calls > 1000 for calls in taken), taken


@pytest.mark.parametrize(
    ("least_bytes", "modules"), short_form("suites", [("0", MODULES), ("1024", FEW)], keep=[1])
)
def test_the_tests_of_mpi4py_pass_through_the_interposer(
    mpirun: Run, suite: Path, least_bytes: str, modules: tuple[str, ...]
) -> None:
    env = {"LD_PRELOAD": str(preload.library()), "HSGD_REPORT": "1", "HSGD_MIN_BYTES": least_bytes}
    done = mpirun(RANKS, suite, "-q", *modules, env=env, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr[-6000:]
    assert failures(done) == set(), done.stderr[-6000:]
    taken = taken_by_rank(done)
    assert len(taken) == RANKS
    if least_bytes == "0":
        assert all(calls > 1000 for calls in taken), taken
    else:
        assert taken == [0] * RANKS  # their messages are small, their communicators short-lived
