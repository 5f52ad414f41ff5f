"""preempted() and save_and_exit(): a signal or the clock ends the job on all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hsgd
from hsgd import Comm
from hsgd.comm import preemption
from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError
from hsgd.jobs.environment import time_limit
from ranks import PATIENT, Ranks, Seat, meeting_point
from toolkit.forked_child import in_forked_child
from torch_job import job

__all__: list[str] = []

MOST_RANKS = 4
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
AT, MOST = 5, 40  # step in which the signal comes, and steps of a program that nobody stops


@contextlib.contextmanager
def new_process() -> Iterator[None]:
    """Nothing is known, as in a new process; handlers are as before when the block has ended."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before, preemption._state = preemption._state, preemption._Preemption()
    try:
        yield
    finally:
        preemption._state = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def program(
    kind: str, seat: Seat, path: str, size: int, folder: str
) -> Iterator[Callable[[], object]]:
    """A step of a program of this kind."""
    if kind.startswith("hvd"):
        with job(seat, path, size) as hvd:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "hvd":
                optimizer = hvd.DistributedOptimizer(optimizer)
            yield train(model, optimizer) if kind == "hvd" else (lambda: None)
    elif kind == "ddp":
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("hsgd", store=store, rank=seat.rank, world_size=size)
        try:
            ddp = nn.parallel.DistributedDataParallel(net())
            yield train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
        finally:
            dist.destroy_process_group()
    else:
        with Comm.local(path, seat.rank, size, PATIENT) as comm:
            yield {
                "comm": lambda: comm.allreduce(np.ones(3)),
                "comm, asynchronous": lambda: comm.allreduce_async(np.ones(100_000)),
                "comm, idle": lambda: None,
            }[kind]


def do_steps(seat: Seat, kind: str, size: int, path: str, folder: str, number: int) -> list[int]:
    """Return the steps after which the job was to stop; the last rank is told."""
    with new_process(), program(kind, seat, path, size, folder) as step:
        told: list[int] = []
        for count in range(MOST):
            step()
            if hsgd.preempted():
                told.append(count)
            if count == AT and seat.rank == size - 1:
                os.kill(os.getpid(), number)
        return told


KINDS = ("hvd", "hvd, idle", "ddp", "comm", "comm, asynchronous", "comm, idle")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    ranks: Ranks, tmp_path: Path, kind: str, size: int
) -> None:
    number = SIGNALS[KINDS.index(kind) % 3]
    found = ranks.run(do_steps, kind, size, meeting_point(), str(tmp_path), number, on=range(size))
    assert found == [found[0]] * size
    first = found[0][0]
    assert first in (AT + 1, AT + 2) and found[0] == [*range(first, MOST)]


def do_count(seat: Seat, path: str) -> int:
    with new_process(), Comm.local(path, seat.rank, 2, PATIENT) as comm:
        for _ in range(10):
            comm.allreduce(np.ones(3))
            hsgd.preempted()
        return comm.metrics().calls


def test_it_sends_nothing_of_its_own_beside_the_collectives_of_a_program(ranks: Ranks) -> None:
    assert ranks.run(do_count, meeting_point(), on=range(2)) == [10, 10]


def do_take(seat: Seat) -> list[object]:
    """Handlers that the program installs before and after; a forked child; one that is restored."""
    said: list[object] = []

    def note(word: str) -> Callable[[int, FrameType | None], None]:
        return lambda *_: said.append(word)

    with new_process():
        signal.signal(signal.SIGUSR1, note("before"))
        said.append(hsgd.preempted())
        signal.signal(signal.SIGUSR1, note("after"))  # as Lightning does in fit()
        time.sleep(preemption._LOOK_S)
        said.append(hsgd.preempted())
        said.append(in_forked_child(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
        os.kill(os.getpid(), signal.SIGUSR1)
        said.append(hsgd.preempted())
    return said


def test_signals_are_taken_from_other_handlers_and_left_to_children(ranks: Ranks) -> None:
    assert ranks.run(do_take, on=[0]) == [[False, False, True, True]]


def do_parts(seat: Seat, path: str, known: bool) -> list[object]:
    """Communicators of two ranks each in a job of four, and, if `known`, one of all."""
    os.environ |= {"PMI_RANK": str(seat.rank), "PMI_SIZE": "4"}
    try:
        with (
            new_process(),
            Comm.local(f"{path}-{seat.rank // 2}", seat.rank % 2, 2, PATIENT) as part,
        ):
            if not known:
                with pytest.raises(LaunchError, match="started 4 ranks"):
                    hsgd.preempted()
                return []
            with Comm.local(path, seat.rank, 4, PATIENT):
                found = []
                for count in range(4):
                    part.barrier()
                    if count == 1 and seat.rank == 3:
                        os.kill(os.getpid(), signal.SIGUSR2)
                    found.append(hsgd.preempted())
                return found
    finally:
        del os.environ["PMI_RANK"], os.environ["PMI_SIZE"]


@pytest.mark.parametrize("known", [False, True])
def test_a_communicator_of_some_ranks_does_not_speak_for_all(ranks: Ranks, known: bool) -> None:
    found = ranks.run(do_parts, meeting_point(), known, on=range(4))
    assert found == [[False, True, True, True] if known else []] * 4


def do_chosen(seat: Seat) -> bool:
    os.environ["HSGD_PREEMPT_SIGNALS"] = "USR2"
    try:
        with new_process():
            hsgd.preempted()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGUSR1)
            first = hsgd.preempted()
            os.kill(os.getpid(), signal.SIGUSR2)
            return not first and hsgd.preempted()
    finally:
        del os.environ["HSGD_PREEMPT_SIGNALS"]


def test_the_signals_are_chosen_by_a_variable(ranks: Ranks) -> None:
    assert ranks.run(do_chosen, on=[0]) == [True]
    for wrong in ("SIGTERM", "TERM,", "KILL", "SEGV", "NONE"):
        with pytest.raises(ValueError, match="HSGD_PREEMPT_SIGNALS"):
            Config.from_env({"HSGD_PREEMPT_SIGNALS": wrong})


# --- saving ---


def do_save(seat: Seat, path: str, folder: str, on_all: bool) -> object:
    config = dataclasses.replace(PATIENT, timeout_s=1.5)

    def save() -> None:
        if seat.rank == 0:
            time.sleep(2 * config.timeout_s)
        Path(folder, str(seat.rank)).touch()

    with new_process(), Comm.local(path, seat.rank, 3, config):
        try:
            hsgd.save_and_exit(save, on_all=on_all, exit_code=3)
        except SystemExit as error:
            return error.code


@pytest.mark.parametrize("on_all", [False, True])
def test_others_wait_for_the_rank_that_saves_beyond_the_deadline_of_a_collective(
    ranks: Ranks, tmp_path: Path, on_all: bool
) -> None:
    assert ranks.run(do_save, meeting_point(), str(tmp_path), on_all, on=range(3)) == [3, 3, 3]
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == (["0", "1", "2"] if on_all else ["0"])


def do_fail(seat: Seat, path: str, failing: int, on_all: bool) -> str:
    def save() -> None:
        if seat.rank == failing:
            raise OSError("disk full")

    with new_process(), Comm.local(path, seat.rank, 3, PATIENT):
        with pytest.raises((OSError, HsgdError)) as caught:
            hsgd.save_and_exit(save, on_all=on_all)
        return str(caught.value)


@pytest.mark.parametrize(("failing", "on_all"), [(0, False), (0, True), (2, True)])
def test_a_rank_that_cannot_save_is_an_error_on_all(
    ranks: Ranks, failing: int, on_all: bool
) -> None:
    found = ranks.run(do_fail, meeting_point(), failing, on_all, on=range(3))
    expected = ["save_and_exit: another rank failed to save; its error says why"] * 3
    expected[failing] = "disk full"
    assert found == expected


def do_lose(seat: Seat, path: str, folder: str) -> object:
    def save() -> None:
        time.sleep(1.5)
        Path(folder, "saved").touch()

    with new_process():
        comm = Comm.local(path, seat.rank, 3, PATIENT)
        if seat.rank == 2:
            comm.close()
            return "left"
        try:
            hsgd.save_and_exit(save)
        except SystemExit as error:
            return error.code
        except HsgdError as error:
            return type(error).__name__
        finally:
            comm.close()


def test_a_rank_that_is_lost_meanwhile_costs_no_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(do_lose, meeting_point(), str(tmp_path), on=range(3))
    assert found == [0, "PeerLost", "left"] and (tmp_path / "saved").exists()


# --- the clock ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04\n", 93784),
        ("02:03:04\n", 7384),
        ("3:04\n", 184),
        ("0:00\n", 0),
        ("UNLIMITED\n", None),
        ("INVALID\n", None),
    ],
)
def test_the_time_that_slurm_leaves(
    text: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, monkeypatch, "squeue", text)
    assert time_limit.left_s({"SLURM_JOB_ID": "17"}) == seconds


def told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, code: int = 0
) -> None:
    """A scheduler's command that prints this."""
    (folder / "said").write_text(text)
    command = folder / name
    command.write_text(
        f"#!/bin/sh\necho asked >> {folder}/asked\ncat {folder}/said\n"
        f"echo slurmctld is down >&2\nexit {code}\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


PBS = """Job Id: 17.head
    Job_Name = train
    resources_used.ncpus = 8
    resources_used.walltime = {used}
    Resource_List.walltime = 24:00:00
"""


def test_the_time_that_pbs_and_flux_leave_by_recorded_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, monkeypatch, "qstat", PBS.format(used="23:58:30"))
    assert time_limit.left_s({"PBS_JOBID": "17.head"}) == 90
    told(tmp_path, monkeypatch, "qstat", "Job Id: 17.head\n")
    assert time_limit.left_s({"PBS_JOBID": "17.head"}) is None
    told(tmp_path, monkeypatch, "flux", "59.5\n")
    assert time_limit.left_s({"FLUX_JOB_ID": "f1"}) == 59.5
    told(tmp_path, monkeypatch, "flux", "infinity\n")
    assert time_limit.left_s({"FLUX_JOB_ID": "f1"}) is None
    assert time_limit.left_s({}) is None


def test_a_task_of_an_array_asks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    told(tmp_path, monkeypatch, "squeue", "3:04\n3:05\n")
    with pytest.raises(LaunchError, match=r"--jobs=17_3 says '3:04.*no time"):
        time_limit.left_s(names)


def test_a_scheduler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(tmp_path, monkeypatch, "squeue", "", code=1)
    with pytest.raises(LaunchError, match="--jobs=17: slurmctld is down"):
        time_limit.left_s({"SLURM_JOB_ID": "17"})
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="squeue"):
        time_limit.left_s({"SLURM_JOB_ID": "17"})


@contextlib.contextmanager
def new_job(folder: str) -> Iterator[None]:
    """A new process of Slurm's job 17, whose commands are in a folder."""
    os.environ |= {"SLURM_JOB_ID": "17", "PATH": f"{folder}:{os.environ['PATH']}"}
    try:
        with new_process():
            yield
    finally:
        del os.environ["SLURM_JOB_ID"]


def do_clock(seat: Seat, path: str, folder: str, within_s: float) -> list[bool]:
    with new_job(folder), Comm.local(path, seat.rank, 2, PATIENT) as comm:
        found = []
        for _ in range(4):
            comm.barrier()
            found.append(hsgd.preempted(within_s=within_s))
        return found


def test_the_end_of_the_job_stops_all_ranks_and_one_rank_asks_once(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, monkeypatch, "squeue", "10:00\n")
    found = ranks.run(do_clock, meeting_point(), str(tmp_path), 60.0, on=range(2))
    assert found == [[False] * 4] * 2
    assert (tmp_path / "asked").read_text().count("asked") == 1
    found = ranks.run(do_clock, meeting_point(), str(tmp_path), 601.0, on=range(2))
    assert found == [[False, True, True, True]] * 2


def said_of_requeue(folder: str) -> list[tuple[str, int]]:
    """Return each line, and how often the scheduler had been asked before it."""
    said: list[tuple[str, int]] = []
    asked = Path(folder) / "asked"
    with mock.patch.object(
        preemption,
        "_say",
        lambda words: said.append((words, asked.read_text().count("asked"))),
    ):
        preemption._requeue("saved")
    return said


def do_short(seat: Seat, folder: str) -> list[tuple[str, int]]:
    with new_job(folder):
        assert hsgd.preempted(within_s=601)
        return said_of_requeue(folder)


def test_a_job_that_is_too_short_is_not_put_back_again_and_again(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, monkeypatch, "squeue", "10:00\n")
    ((line,),) = ranks.run(do_short, str(tmp_path), on=[0])
    assert "saved, but job 17 is not requeued: it would be as short again" in line[0]


def do_requeue(seat: Seat, folder: str) -> list[tuple[str, int]]:
    with new_job(folder):
        return said_of_requeue(folder)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ("JobState=RUNNING Reason=None", "saved, job 17 is requeued"),
        ("JobState=COMPLETING Reason=TimeLimit", "saved, job 17 is requeued"),
        ("JobState=COMPLETING Reason=None", "saved, and job 17 is not requeued: it was cancelled"),
    ],
)
def test_a_cancelled_job_is_not_put_back(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str, said: str
) -> None:
    told(tmp_path, monkeypatch, "scontrol", f"JobId=17 {facts} RunTime=00:01:27\n")
    assert ranks.run(do_requeue, str(tmp_path), on=[0]) == [[(said, 1)]]  # told before it is done
    assert (tmp_path / "asked").read_text().count("asked") == 1 + said.endswith("is requeued")


def test_ranks_that_nothing_connects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with new_process(), pytest.raises(LaunchError, match=r"started 2 ranks.*hvd\.init"):
        hsgd.preempted()
