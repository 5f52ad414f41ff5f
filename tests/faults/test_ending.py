"""An uncaught exception on one rank ends an MPI job, after the others had time to hear of it.

Nothing here asserts on time: hanging ranks sleep for longer than a job may take. Run under mpirun,
this file is the program of the ranks: `python test_ending.py CASE`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hsgd.jobs.environment import ending

__all__: list[str] = []

JOB_S = 240.0
FOR_EVER_S = 10 * JOB_S
SOON = {"HSGD_ABORT_AFTER_S": "1"}

Run = Callable[..., subprocess.CompletedProcess[str]]


def job(mpirun: Run, ranks: int, case: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = mpirun(ranks, __file__, case, env={**SOON, **env}, timeout_s=JOB_S)
    assert done.returncode >= 0, done.stderr
    return done


@pytest.mark.long
def test_a_deadline_that_passes_ends_the_job(mpirun: Run) -> None:
    done = job(mpirun, 2, "hang", HSGD_TIMEOUT_S="1")
    assert done.returncode not in (0, 255), done.stderr
    assert "hsgd.errors.CollectiveTimeout: allreduce" in done.stderr
    assert "hsgd: rank 0 ended by CollectiveTimeout, and 1 s later other" in done.stderr
    assert done.stdout.splitlines() == ["the hook of the program", "the last of rank 0"]


def test_a_second_interrupt_aborts_a_job_whose_ranks_hang(mpirun: Run) -> None:
    done = job(mpirun, 2, "interrupt_twice", HSGD_ABORT_AFTER_S=f"{FOR_EVER_S:g}")
    assert done.returncode not in (0, 255), done.stderr
    assert "hsgd: rank 0 ended by KeyboardInterrupt" in done.stderr


def test_a_rank_whose_output_nobody_reads_ends_the_job(mpirun: Run) -> None:
    done = job(mpirun, 2, "broken_pipe")
    assert done.returncode not in (0, 255), done.stderr
    assert "hsgd: rank 0 ended by RuntimeError, and 1 s later other" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("case", ["fail", "part_of_all"])
def test_other_ranks_hear_who_failed_before_they_are_aborted(mpirun: Run, case: str) -> None:
    done = job(mpirun, 3, case)
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: this rank fails" in done.stderr
    assert "rank 1 (pid " in done.stdout and "raised RuntimeError: this rank fails" in done.stdout
    assert "ended by RuntimeError, and 1 s later other" in done.stderr


@pytest.mark.long
def test_a_rank_that_saves_for_longer_than_the_limit_keeps_its_checkpoint(mpirun: Run) -> None:
    done = job(mpirun, 2, "save")
    assert done.returncode == 1 and "RuntimeError: no luck" in done.stderr
    assert done.stdout.splitlines() == ["saved"], done.stderr


def test_nobody_is_aborted_where_all_ranks_end(mpirun: Run) -> None:
    """The limit is for ever, in effect: they end at once all the same."""
    done = job(mpirun, 2, "all", HSGD_ABORT_AFTER_S=f"{FOR_EVER_S:g}")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: all fail") == 2
    assert "aborted" not in done.stderr


@pytest.mark.long
def test_a_job_whose_first_communicator_is_refused_ends_at_once(mpirun: Run) -> None:
    done = job(mpirun, 3, "refused", HSGD_ABORT_AFTER_S=f"{FOR_EVER_S:g}")
    assert done.returncode == 1
    assert done.stderr.count("have different HSGD_* settings") == 3, done.stderr
    assert "aborted" not in done.stderr


def test_a_rank_that_makes_a_communicator_is_not_taken_for_one_that_ends(mpirun: Run) -> None:
    """What MPI is asked for at the end and in set-up are the same kind of collective."""
    done = job(mpirun, 2, "second")
    assert done.returncode not in (0, 255), done.stderr
    assert "hsgd: rank 0 ended by RuntimeError, and 1 s later other" in done.stderr


def test_the_last_step_has_a_communicator_where_threads_make_the_first_two(mpirun: Run) -> None:
    """Rank 1 makes them in the other order; a third one comes later."""
    done = job(mpirun, 2, "threads")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is ready", "rank 1 is ready"]


@pytest.mark.parametrize("case", ["part", "early"])
def test_a_rank_that_ends_well_aborts_nobody(mpirun: Run, case: str) -> None:
    done = job(mpirun, 2, case, HSGD_ABORT_AFTER_S="0.2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]


@pytest.mark.long
def test_an_interrupted_rank_ends_the_job(mpirun: Run) -> None:
    done = job(mpirun, 2, "interrupt")
    assert done.returncode != 0
    assert "ended by KeyboardInterrupt, and 1 s later other" in done.stderr


@pytest.mark.long
def test_ranks_that_mpirun_keeps_alive_may_go_on(mpirun: Run) -> None:
    done = mpirun(2, __file__, "survive", env=SOON, mca={"mpi_ft_enable": 1}, timeout_s=JOB_S)
    assert "rank 0 went on" in done.stdout, done.stderr
    assert "aborted" not in done.stderr


def test_errors_of_a_prompt_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    state = ending._Ending()
    state.install()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, ValueError("at the prompt"), None)
    assert not state.failure and len(seen) == 1
    monkeypatch.delattr(sys, "ps1")
    sys.excepthook(ValueError, ValueError("in a script"), None)
    assert state.failure == "ValueError" and len(seen) == 2


def test_a_forked_child_takes_no_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(ending, "_await", lambda *_: pytest.fail("waits for ranks"))
    state = ending._Ending()
    state.install()
    state.limit_s, state.failure = 1.0, "ValueError"
    state.pid += 1
    state.last_step()


def test_rounds_of_messages_wait_for_short_pauses_and_a_long_wait_for_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a made-up clock, which only pauses move: nothing depends on the machine's time."""
    pauses: list[float] = []

    def looks_of(rounds: int, limit_s: float) -> tuple[bool, int]:
        """Whether so many looks that find nothing fit in the limit, and how many there were."""
        pauses.clear()
        looks = itertools.count()
        found = ending._await(lambda: next(looks) >= rounds, limit_s)
        return found, next(looks)

    monkeypatch.setattr(ending.time, "sleep", pauses.append)
    monkeypatch.setattr(ending.time, "monotonic", lambda: 100.0 + sum(pauses))
    assert looks_of(rounds=20, limit_s=0.01) == (True, 21)
    found, looks = looks_of(rounds=10**9, limit_s=10.0)
    assert not found and looks < 600
    assert max(pauses) <= ending._PAUSE_S  # so it ends at most that late


# --- the program of the ranks ---


def run_hang(comm: Any) -> None:
    if comm.rank == 1:
        time.sleep(FOR_EVER_S)
    comm.allreduce(np.ones(3))


def run_fail(comm: Any) -> None:
    from hsgd import PeerLost

    if comm.rank == 1:
        raise RuntimeError("this rank fails")
    if comm.rank == 2:
        time.sleep(FOR_EVER_S)
    try:
        comm.allreduce(np.ones(3))
    except PeerLost as error:
        print(error, flush=True)
        raise


run_part_of_all = run_fail  # over a communicator without rank 2


def run_second(comm: Any) -> None:
    from hsgd import Comm

    if comm.rank == 0:
        raise RuntimeError("this rank fails")
    Comm()


def run_threads(comm: Any) -> None:
    """Of a new process's state: on each rank the other thread is the first to prepare."""
    state = ending._ending
    state.goodbye = None
    worlds = [comm.mpi.Dup(), comm.mpi.Dup()]
    if comm.rank == 1:
        worlds.reverse()
    held = threading.Event()

    def second() -> None:
        held.wait()
        ending.prepare_goodbye(worlds[1], JOB_S)

    class First:
        """The other thread comes while this one prepares."""

        Idup = worlds[0].Idup

        def Iallreduce(self, *arguments: Any) -> Any:
            held.set()
            return worlds[0].Iallreduce(*arguments)

    thread = threading.Thread(target=second)
    thread.start()
    ending.prepare_goodbye(First(), JOB_S)
    thread.join()
    ending.prepare_goodbye(comm.mpi, JOB_S)
    state.goodbye.Barrier()
    print(f"rank {comm.rank} is ready", flush=True)


def run_all(comm: Any) -> None:
    comm.barrier()
    raise RuntimeError("all fail")


def run_save(comm: Any) -> None:
    import hsgd

    hsgd.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    while not hsgd.preempted():
        comm.barrier()
    if comm.rank == 1:
        raise RuntimeError("no luck")
    time.sleep(3 * float(SOON["HSGD_ABORT_AFTER_S"]))
    print("saved", flush=True)


def run_early(comm: Any) -> None:
    """Rank 0 ends while rank 1 has work of its own, for longer than the limit."""
    time.sleep(comm.rank)
    print(f"rank {comm.rank} ends", flush=True)
    sys.exit(0)


def run_part(comm: Any) -> None:
    """Rank 0 calls MPI.Finalize() itself."""
    from mpi4py import MPI

    print(f"rank {comm.rank} ends", flush=True)
    if comm.rank == 0:
        comm.close()
        MPI.Finalize()


def run_interrupt(comm: Any) -> None:
    if comm.rank == 0:
        raise KeyboardInterrupt
    time.sleep(FOR_EVER_S)


def run_interrupt_twice(comm: Any) -> None:
    if comm.rank == 1:
        time.sleep(FOR_EVER_S)
    wait = ending._await

    def interrupted(*arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return wait(*arguments)

    ending._await = interrupted
    raise KeyboardInterrupt


def run_broken_pipe(comm: Any) -> None:
    if comm.rank == 1:
        time.sleep(FOR_EVER_S)
    read, write = os.pipe()
    os.close(read)
    sys.stdout = os.fdopen(write, "w")
    print("nobody reads this")
    raise RuntimeError("this rank fails")


def run_survive(comm: Any) -> None:
    from hsgd import PeerLost

    if comm.rank == 1:
        raise RuntimeError("this rank fails")
    with pytest.raises(PeerLost):
        comm.allreduce(np.ones(3))
    time.sleep(3 * float(SOON["HSGD_ABORT_AFTER_S"]))
    print(f"rank {comm.rank} went on", flush=True)
    os._exit(0)


def _part() -> Any:
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < 2)
    if MPI.COMM_WORLD.rank == 2:
        time.sleep(FOR_EVER_S)
    return part


def main(case: str) -> None:
    def hook(*error: Any) -> None:
        if case == "hang":
            print("the hook of the program", flush=True)
        sys.__excepthook__(*error)

    sys.excepthook = hook
    from hsgd import Comm

    if case == "refused":
        from mpi4py import MPI

        os.environ["HSGD_CHUNK_BYTES"] = str(4096 * (1 + MPI.COMM_WORLD.rank))
    comm = Comm(_part() if case == "part_of_all" else None)
    if case == "hang":
        atexit.register(lambda: print(f"the last of rank {comm.rank}", flush=True))
    globals()[f"run_{case}"](comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
