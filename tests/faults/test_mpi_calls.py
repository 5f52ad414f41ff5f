"""A rank that hangs, or ends, while the others are in a call of MPI that makes a communicator.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.job import ending
from hsgd.job.mpi_calls import call_within
from hsgd.testing.cluster import Cluster
from test_fault_nodes import RANKS, report, reports_of, wait_for_reports

__all__: list[str] = []

TIMEOUT_S = 2.0
BOUND_S = 2 * TIMEOUT_S + 4.0  # loaded machines
VICTIM = 3


@pytest.mark.parametrize("case", ["split", "group"])
def test_no_rank_waits_for_ever_for_one_that_hangs_in_a_call_of_mpi(
    cluster: Callable[..., Cluster], tmp_path: Path, case: str
) -> None:
    argv = [sys.executable, __file__, case, str(tmp_path)]
    done = cluster(2).mpirun(RANKS, argv, options=("--with-ft", "ulfm"), timeout_s=60)
    for line in reports_of(done):
        assert line["kind"] == "CollectiveTimeout", line
        assert "within 2 s" in line["line"] and "\n" not in line["line"], line
        assert line["took_s"] < BOUND_S, line


@pytest.mark.parametrize("case", ["uncaught", "caught"])
def test_a_program_whose_rank_hangs_in_a_call_of_mpi_ends(
    cluster: Callable[..., Cluster], case: str
) -> None:
    """MPI_Finalize, beside a call that was given up, would crash or wait for ever."""
    done = cluster(2).mpirun(RANKS, [sys.executable, __file__, case, ""], timeout_s=60)
    assert done.returncode != 0
    assert "received signal" not in done.stderr, done.stderr  # what Open MPI says of a crash
    assert "MPI is in a call that was given up (split: MPI_Comm_split)" in done.stderr


@pytest.fixture
def mpi() -> Any:
    """Whose calls another thread may make."""
    module = pytest.importorskip("mpi4py.MPI")
    assert module.Query_thread() >= module.THREAD_SERIALIZED
    return module


def test_what_mpi_says_of_a_rank_that_ended_is_a_lost_peer(
    mpi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    monkeypatch.setattr(ending, "give_up", lambda what, _: given_up.append(what))

    def fail(code: int) -> Callable[[], object]:
        def call() -> object:
            raise mpi.Exception(code)

        return call

    assert call_within(5.0, "split", operator.add, 3, 4) == 7
    with pytest.raises(PeerLost, match="split: a rank ended"):
        call_within(5.0, "split", fail(mpi.ERR_PROC_FAILED))
    with pytest.raises(HsgdError, match="split: MPI_ERR_COMM") as other:
        call_within(5.0, "split", fail(mpi.ERR_COMM))
    assert not isinstance(other.value, PeerLost)
    assert not given_up
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, "split", operator.floordiv, 1, 0)
    with pytest.raises(CollectiveTimeout, match=r"split: not all ranks .* within 0.05 s"):
        call_within(0.05, "split", time.sleep, 1)
    assert given_up == ["split"]


def test_a_call_that_has_returned_late_lets_the_program_end_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ending._Ending()
    monkeypatch.setattr(ending, "_ending", state)
    monkeypatch.setattr(state, "install", lambda: None)
    state.pid = os.getpid()
    aborted: list[str] = []
    monkeypatch.setattr(state, "abort", lambda _, reason, advice: aborted.append(reason))
    over: list[bool] = []
    ending.give_up("split", lambda: bool(over))
    state.last_step()
    assert aborted == ["MPI is in a call that was given up (split)"]
    over.append(True)
    state.last_step()
    assert len(aborted) == 1


# --- the program of the ranks ---


class Absent:
    """In place of an mpi4py communicator: this rank comes to the call, and makes none."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        if name in ("Split", "Create_group"):
            return lambda *_: time.sleep(3600)
        return getattr(self._comm, name)


def run_split(rank: int) -> None:
    from hsgd import Comm
    from hsgd.config import Config

    comm = Comm(config=Config(timeout_s=TIMEOUT_S))
    if rank == VICTIM:
        vars(comm)["_mpi"] = Absent(comm.mpi)
    try:
        comm.split(0)
    finally:
        with pytest.raises(PeerLost, match="since an earlier error"):
            comm.barrier()


def run_uncaught(rank: int) -> None:
    from hsgd import Comm
    from hsgd.config import Config

    comm = Comm(config=Config(timeout_s=TIMEOUT_S))
    if rank == VICTIM:
        vars(comm)["_mpi"] = Absent(comm.mpi)
    comm.split(0)


def run_caught(rank: int) -> None:
    with contextlib.suppress(CollectiveTimeout):
        run_uncaught(rank)


def run_group(rank: int) -> None:
    from datetime import timedelta

    import torch.distributed
    from mpi4py import MPI

    import hsgd.c10d  # noqa: F401

    dist: Any = torch.distributed
    if rank == VICTIM:
        vars(MPI)["COMM_WORLD"] = Absent(MPI.COMM_WORLD)
    dist.init_process_group("hsgd", timeout=timedelta(seconds=TIMEOUT_S))
    dist.barrier()


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    from mpi4py import MPI

    if case in ("caught", "uncaught"):
        {"caught": run_caught, "uncaught": run_uncaught}[case](rank)
        return
    os.environ.update(MASTER_ADDR="node1", MASTER_PORT="29731")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(MPI.COMM_WORLD.size))
    MPI.COMM_WORLD.Barrier()
    begin = time.monotonic()
    try:
        {"split": run_split, "group": run_group}[case](rank)
    except HsgdError as error:
        took_s = time.monotonic() - begin
        report(folder, rank, kind=type(error).__name__, line=str(error), took_s=took_s)
    wait_for_reports(folder)
    os._exit(0)


if __name__ == "__main__":
    main()
