"""Fixtures for all tests: virtual nodes, mpirun on one node, and proof that a test leaves nothing.

Owns the clusters that tests share. Never runs pytest under mpirun: ranks are started from pytest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest

from ranks import Ranks
from toolkit.cluster import Cluster
from toolkit.processes import end_marked, marked, outliving, run_marked
from toolkit.shared_files import orphaned_files, shared_files
from toolkit.slurm import Slurm

__all__: list[str] = []

TESTS = Path(__file__).parent
# Programs that tests start, on virtual nodes too, find there what tests share.
os.environ["PYTHONPATH"] = f"{TESTS}:{TESTS / 'support'}"
# With it print() writes a line in two pieces, between which another rank's line may get.
os.environ.pop("PYTHONUNBUFFERED", None)
GRACE_S = 10.0  # daemons of mpirun may end a little after it
_clusters: dict[tuple[int, str | None, bool], Cluster] = {}


# No test fails because a machine is slow.
hypothesis.settings.register_profile("hsgd", deadline=None)
hypothesis.settings.load_profile("hsgd")
_began = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        metavar="S",
        help="begin no test S seconds after the start: the summary counts those that are left out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes long last, if there is a budget."""
    if config.getoption("--budget") is not None:
        items.sort(key=lambda item: item.get_closest_marker("long") is not None)


def pytest_collection_finish() -> None:
    """Keeps what was imported, torch above all, out of each test's garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("--budget")
    if budget_s is not None and time.monotonic() - _began > budget_s:
        pytest.skip(f"left out: {budget_s:g} s are over; make test or test-long runs it")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A pool of as many ranks as the module's MOST_RANKS says."""
    with Ranks(request.module.MOST_RANKS) as pool:
        yield pool


@pytest.fixture(scope="session")
def virtual_nodes() -> None:
    """Skips, with the reason, where virtual nodes cannot be made; in CI that is a failure."""
    _need("the tests between nodes", Cluster.reason_unavailable())


@pytest.fixture(scope="session")
def horovod() -> None:
    """Skips where Horovod itself is not installed; in CI that is a failure."""
    found = importlib.util.find_spec("horovod")
    remedy = "Horovod is not installed: python -m hsgd.jobs.launch.horovod_wheel --install"
    _need("the tests that need Horovod", None if found else remedy)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A real Slurm on two virtual nodes. Skips where it is not installed; in CI a failure."""
    _need("the tests of Slurm", Slurm.reason_unavailable())
    with Slurm() as made:
        yield made


def _need(what: str, reason: str | None) -> None:
    if reason and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI must run {what}: {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(virtual_nodes: None) -> Iterator[Callable[..., Cluster]]:
    """cluster(nodes=2, rate=None, pid=False): virtual nodes, shared by all tests that ask alike."""

    def get(nodes: int = 2, rate: str | None = None, *, pid: bool = False) -> Cluster:
        key = (nodes, rate, pid)
        if key not in _clusters:
            _clusters[key] = Cluster(nodes, rate, pid=pid)
        return _clusters[key]

    yield get
    while _clusters:
        _clusters.popitem()[1].close()


@pytest.fixture
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """mpirun(np, script, *args, env=None, mca=None, timeout_s=60): ranks of a Python file, here.

    More ranks than cores are fine. Returns the CompletedProcess; raises CommandTimeout past the
    limit, after ending all ranks. Settings go through the environment, which MPICH ignores.
    """

    def run(
        np: int,
        script: str | Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        mca: Mapping[str, str | int] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        crowded = np > len(os.sched_getaffinity(0))
        settings = {"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {}
        settings |= {f"OMPI_MCA_{name}": str(value) for name, value in (mca or {}).items()}
        fixed = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
        beside = Path(sys.executable).with_name("mpirun")
        launch = [str(beside) if beside.exists() else "mpirun", "-n", str(np), sys.executable]
        everything = {"OMP_NUM_THREADS": "1", **os.environ, **fixed, **settings, **(env or {})}
        return run_marked([*launch, str(script), *args], everything, timeout_s)

    return run


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves processes or files in /dev/shm; ends the processes first."""
    children_before, files_before = _children(), shared_files()
    yield
    shared = {cluster.pid for cluster in _clusters.values()}
    mine = f"{os.getpid()}."
    suspects = (_children() - children_before - shared) | set(marked(mine))
    left = {pid: _describe(pid) for pid in outliving(suspects, GRACE_S)}
    for pid in left.keys() & _children():
        os.kill(pid, signal.SIGKILL)
    end_marked(mine)
    files = orphaned_files(files_before, GRACE_S)
    if left:
        pytest.fail(f"processes left behind: {'; '.join(left.values())}")
    if files:
        pytest.fail(f"files left behind in /dev/shm: {', '.join(files)}")


def _children() -> set[int]:
    """Child processes of this one, but for the standard library's own servants."""
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that just ended
            pids |= {int(pid) for pid in path.read_text().split()}
    return {pid for pid in pids if "multiprocessing." not in _describe(pid)}


def _describe(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        line = "gone"
    return f"{pid} {line.strip()}"
