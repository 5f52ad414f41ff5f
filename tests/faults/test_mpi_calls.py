"""A rank hangs while the others are in a call of MPI that makes a communicator.

Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from hsgd.comm.connect.mpi_calls import call_within
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.environment import ending
from test_fault_nodes import RANKS, report, reports_of, wait_for_reports
from toolkit.cluster import Cluster

__all__: list[str] = []

TIMEOUT_S = 2.0
VICTIM = 3
CALLS = {
    "split": "split: MPI_Comm_split",
    "part": "split: MPI_Comm_split",
    "group": "the ranks of a group: MPI_Comm_create_group",
    "init": "init: MPI_Comm_create_group",
}


@pytest.mark.long
@pytest.mark.parametrize("case", CALLS)
def test_no_rank_waits_for_ever_for_one_that_hangs_in_a_call_of_mpi(
    cluster: Callable[..., Cluster], tmp_path: Path, case: str
) -> None:
    argv = [sys.executable, __file__, case, str(tmp_path)]
    done = cluster(2).mpirun(RANKS, argv, options=("--with-ft", "ulfm"), timeout_s=60)
    for line in reports_of(done):
        assert line["kind"] == "CollectiveTimeout", line
        assert line["line"].startswith(f"{CALLS[case]}: did not return within 2 s, "), line
        assert "\n" not in line["line"]


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")], ids=["mpi", "ulfm"])
@pytest.mark.parametrize("case", ["uncaught", "caught"])
def test_a_program_whose_rank_hangs_in_a_call_of_mpi_ends(
    cluster: Callable[..., Cluster], case: str, options: tuple[str, ...]
) -> None:
    """MPI_Finalize, beside a call that was given up, would crash or wait for ever."""
    argv = [sys.executable, __file__, case]
    env = {"HSGD_ABORT_AFTER_S": "2", "HSGD_TIMEOUT_S": str(TIMEOUT_S)}
    done = cluster(2).mpirun(RANKS, argv, options=options, env=env, timeout_s=60)
    assert "received signal" not in done.stderr, done.stderr  # what Open MPI says of a crash
    assert done.returncode != 0
    if case == "caught":
        assert "goes on to its end" in done.stdout
    else:
        assert f"CollectiveTimeout: {CALLS['split']}: did not return" in done.stderr, done.stderr
    if not options:
        why = "was given up (split: MPI_Comm_split)" if case == "caught" else "had not ended"
        assert any(
            line.startswith(f"hsgd: rank {rank} ended") and why in line
            for line in done.stderr.splitlines()
            for rank in range(RANKS - 1)
        ), done.stderr


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_a_call_of_mpi_gets_a_deadline_where_threads_may_call_it(
    mpirun: Callable[..., CompletedProcess[str]], level: str
) -> None:
    done = mpirun(1, __file__, level)
    assert done.returncode == 0, done.stderr
    assert "well" in done.stdout


def test_a_call_that_has_returned_late_lets_the_program_end_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ending._Ending()
    monkeypatch.setattr(ending, "_ending", state)
    monkeypatch.setattr(state, "install", lambda: None)
    state.pid = os.getpid()
    over: list[bool] = []
    ending.give_up("split", lambda: bool(over))
    assert ending.stuck() == ["split"]
    over.append(True)
    assert ending.stuck() == []
    state.last_step()  # nothing to wait for: no MPI is asked


# --- the programs of the ranks ---


class Absent:
    """In place of an mpi4py communicator: this rank comes to the call, and makes none."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        if name in ("Split", "Create_group"):
            return lambda *_: time.sleep(3600)
        return getattr(self._comm, name)


def be_absent(rank: int, comm: Any) -> None:
    if rank == VICTIM:
        vars(comm)["_mpi"] = Absent(comm.mpi)


def run_split(rank: int) -> None:
    from hsgd import Comm
    from hsgd.config import Config

    comm = Comm(config=Config(timeout_s=TIMEOUT_S))
    be_absent(rank, comm)
    try:
        comm.split(0)
    finally:
        with pytest.raises(PeerLost, match="since an earlier error"):
            comm.barrier()


def run_part(rank: int) -> None:
    """MPI is in a communicator that is hsgd's own: closing its Comm must not free that."""
    from hsgd import Comm
    from hsgd.config import Config

    comm = Comm(config=Config(timeout_s=TIMEOUT_S))
    part = comm.split(0)
    assert part is not None
    be_absent(rank, part)
    try:
        with part:
            part.split(0)
    finally:
        assert rank == VICTIM or part.mpi  # false where it was freed
        with pytest.raises(HsgdError):  # MPI makes no communicator any more, on some rank at least
            comm.split(0)


def run_group(rank: int) -> None:
    from datetime import timedelta

    import torch.distributed
    from mpi4py import MPI

    if rank == VICTIM:
        vars(MPI)["COMM_WORLD"] = Absent(MPI.COMM_WORLD)
    dist: Any = torch.distributed
    dist.init_process_group("hsgd", timeout=timedelta(seconds=TIMEOUT_S))


def run_init(rank: int) -> None:
    from mpi4py import MPI

    import hsgd.torch as hvd

    if rank == VICTIM:
        vars(MPI)["COMM_WORLD"] = Absent(MPI.COMM_WORLD)
    hvd.init(range(RANKS))


def run_uncaught(rank: int) -> None:
    import hsgd.comm.communicator
    from hsgd import Comm

    comm = Comm()
    if rank == VICTIM:
        vars(hsgd.comm.communicator)["call_within"] = hang
    comm.split(0)


def hang(*_: object, **__: object) -> None:
    """Where others survive, mpirun waits for this rank as well."""
    time.sleep(5 * TIMEOUT_S if ending._others_survive() else 3600)
    os._exit(0)


def run_caught(rank: int) -> None:
    try:
        run_uncaught(rank)
    except CollectiveTimeout:
        print("goes on to its end")


def refuse(reason: str) -> None:
    raise RuntimeError(reason)


def run_alone(level: str) -> None:
    import mpi4py

    mpi4py.rc.thread_level = level
    from mpi4py import MPI

    def fail(code: int) -> None:
        raise MPI.Exception(code)

    def work(result: int) -> int:
        time.sleep(0.2)
        return result

    given_up: list[str] = []
    assert call_within(5.0, "split", partial(work, 7)) == 7
    with pytest.raises(PeerLost, match="split: a rank ended"):
        call_within(5.0, "split", partial(fail, MPI.ERR_PROC_FAILED))
    with pytest.raises(HsgdError, match="split: ") as other:
        call_within(5.0, "split", partial(fail, MPI.ERR_COMM))
    assert not isinstance(other.value, PeerLost)
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, "split", partial(divmod, 1, 0))
    if level == "multiple":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("threading.Thread.start", partial(refuse, "can't start new thread"))
            with pytest.raises(HsgdError, match="no thread could be started"):
                call_within(5.0, "split", partial(work, 7))
        assert ending.stuck() == []
        note = partial(given_up.append, "split")
        with pytest.raises(CollectiveTimeout, match=r"split: did not return within 0.05 s"):
            call_within(0.05, "split", partial(work, 7), given_up=note)
        with pytest.raises(HsgdError, match="create: MPI makes no communicator any more"):
            call_within(5.0, "create", partial(work, 7))
        while ending.stuck():
            time.sleep(0.01)
        assert given_up == ["split"]
    assert call_within(0.05 if level == "serialized" else 5.0, "split", partial(work, 7)) == 7
    print("well")


def main() -> None:
    case, *words = sys.argv[1:]
    if case in ("multiple", "serialized"):
        run_alone(case)
        return
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if not words:
        {"caught": run_caught, "uncaught": run_uncaught}[case](rank)
        return
    import torch  # noqa: F401  so that no rank comes late to the call
    from mpi4py import MPI

    folder = Path(words[0])
    os.environ.update(MASTER_ADDR="node1", MASTER_PORT="29731", HSGD_TIMEOUT_S=str(TIMEOUT_S))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(MPI.COMM_WORLD.size))
    run = {"split": run_split, "part": run_part, "group": run_group, "init": run_init}[case]
    MPI.COMM_WORLD.Barrier()
    try:
        run(rank)
    except HsgdError as error:
        report(folder, rank, kind=type(error).__name__, line=str(error))
    wait_for_reports(folder)
    os._exit(0)


if __name__ == "__main__":
    main()
