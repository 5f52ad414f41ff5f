"""Backend "hsgd" when something ends: groups, ranks, patience."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from backend_programs import group, made
from hsgd.comm.connect import own_node, tcp_meeting
from hsgd.errors import HsgdError
from ranks import Ranks, Seat

__all__: list[str] = []


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as pool:
        yield pool


def do_lose(seat: Seat, path: str) -> tuple[str, str]:
    """A subgroup numbers its ranks anew: errors name those of the job."""
    with group(seat.rank, 3, path):
        part = dist.new_group([1, 2], timeout=timedelta(seconds=30))
        dist.barrier()
        if seat.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        texts = []
        for part_or_whole in (part,) * (seat.rank == 1) + (dist.group.WORLD,):
            try:
                for _ in range(3):
                    dist.all_reduce(torch.ones(5), group=part_or_whole)
            except ConnectionError as error:
                texts.append(f"{type(error).__name__}: {error}")
        work = dist.all_reduce(torch.ones(5), async_op=True)
        try:
            work.wait()  # broken for good, and at once
        except Exception as error:
            texts.append(type(error).__name__)
    return tuple(texts)  # type: ignore[return-value]


def test_a_killed_rank_is_named_by_its_rank_in_the_job(ranks: Ranks, path: str) -> None:
    ranks.start(do_lose, path)
    outcomes = ranks.finish(on=(0, 1))
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert len(outcome.value) >= 2
        assert all("PeerLost: " in text and "rank 2 " in text for text in outcome.value[:-1])


NODES = {"one node": [0, 0, 0], "two nodes": [0, 0, 1]}


def do_fail_in_part(seat: Seat, path: str, how: str, nodes: list[int]) -> tuple[int, str]:
    """(rank, text) of the error of rank 1 in the group of ranks 1 and 2."""
    tcp_meeting.find_nodes = lambda board, _: own_node.number_nodes(
        [nodes[member] for member in board.members]
    )
    with group(seat.rank, 3, path):
        part = dist.new_group([1, 2], timeout=timedelta(seconds=2))
        dist.barrier()
        if seat.rank == 2 and how == "leaves":
            raise OSError("rank 0 has no disk, nor has rank 1")
        if seat.rank == 2 and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if seat.rank == 2 and how == "is late":
            assert seat.pipe.recv() == "go"
        elif seat.rank > 0:
            try:
                dist.all_reduce(torch.ones(4 + seat.rank), group=part)
            except HsgdError as error:
                return error.rank, str(error)
    return -1, "nothing happened"


@pytest.mark.parametrize("where", NODES)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("leaves", r"rank 2 \(pid \d+, \S+\) .*OSError: rank 0 has no disk, nor has rank 1$"),
        ("dies", "rank 2 .* died"),
        ("is late", "not finished .*: (still waiting for the node of )?rank 2"),
        ("differs", "rank 1 sent 5 float32, rank 2 sent 6 float32"),
    ],
)
def test_errors_in_a_group_have_the_ranks_of_the_job_and_quote_words_unchanged(
    ranks: Ranks, path: str, how: str, words: str, where: str
) -> None:
    ranks.start(do_fail_in_part, path, how, NODES[where])
    (outcome,) = ranks.finish(on=[1])
    ranks.send(2, "go") if how == "is late" else None
    assert outcome.error is None, outcome.trace
    rank, text = outcome.value
    assert rank == 2
    assert re.search(words, text), text


def do_set_up_wrongly(seat: Seat, path: str) -> str:
    with group(seat.rank, 3, path):
        if seat.rank == 2:
            os.environ["HSGD_SLOTS"] = "5"
        try:
            dist.new_group([1, 2])
        except ValueError as error:
            return str(error)
    return "made"


def test_a_refused_group_says_which_ranks_of_the_job_differ(ranks: Ranks, path: str) -> None:
    made_on_0, *refused = ranks.run(do_set_up_wrongly, path)
    assert made_on_0 == "made"
    for rank, text in zip((1, 2), refused, strict=True):
        assert text.startswith(f"ranks {rank} and {3 - rank} have different settings (slots)")


def do_wait_in_vain(seat: Seat, path: str) -> str:
    with group(seat.rank, 2, path, limit=timedelta(seconds=1)):
        if seat.rank == 1:
            seat.tell("waits")
            assert seat.pipe.recv() == "go"
            return ""
        try:
            dist.all_reduce(torch.ones(5))
        except TimeoutError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_the_groups_timeout_is_the_cores_deadline(ranks: Ranks, path: str) -> None:
    ranks.start(do_wait_in_vain, path, on=range(2))
    ranks.hear(1)
    (outcome,) = ranks.finish(on=[0])
    ranks.send(1, "go")
    ranks.finish(on=[1])
    assert outcome.value.startswith("CollectiveTimeout: ") and "rank 1" in outcome.value


def do_come_alone(seat: Seat, path: str) -> str:
    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=0.5)
    import hsgd.c10d

    hsgd.c10d.register()
    try:
        dist.init_process_group("hsgd", store=store, rank=0, world_size=2, timeout=limit)
    except TimeoutError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_rank_that_does_not_come_is_named(ranks: Ranks, path: str) -> None:
    (text,) = ranks.run(do_come_alone, path, on=[0])
    assert text.startswith("CollectiveTimeout: init_process_group: rank 1 did not join within 0.5")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def do_end(seat: Seat, path: str) -> tuple[int, list[str], str]:
    """(descriptors that stay, threads of hsgd that stay, what a dead group says)"""

    def live(number: int) -> object:
        with group(seat.rank, 2, f"{path}{number}") as whole:
            part = dist.new_group([0, 1])
            works = [dist.all_reduce(made(seat.rank, 5), group=part, async_op=True)]
            works += [dist.all_reduce(made(seat.rank, 5), async_op=True)]
            dist.barrier()
            return whole

    live(0)
    before = descriptors()
    for number in range(1, 4):
        whole = live(number)
    names = [thread.name for thread in threading.enumerate() if thread.name == "hsgd"]
    try:
        whole.allreduce([torch.ones(1)])
    except RuntimeError as error:
        text = str(error)
    except Exception as error:
        text = str(error)
    return descriptors() - before, names, text


def test_a_destroyed_group_leaves_nothing_and_says_that_it_is_gone(ranks: Ranks, path: str) -> None:
    for more, threads, text in ranks.run(do_end, path, on=range(2)):
        assert more <= 0 and threads == []
        assert text == "hsgd: the process group was destroyed; make a new one"


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LISTED = "'hsgd' in torch.distributed.Backend.backend_list"
KNOWN = f"print({LISTED}, 'hsgd.c10d.process_group' in s.modules)"


def test_torch_knows_the_backend_without_an_import_of_hsgd() -> None:
    assert python(f"import sys as s, torch, torch.distributed; {KNOWN}") == "True False"


@pytest.mark.parametrize("said", ["import hsgd.c10d; hsgd.c10d.register()", "import hsgd.torch"])
def test_without_entry_points_an_import_registers_it_and_leaves_horovod_alone(said: str) -> None:
    code = f"import sys as s, torch, torch.distributed; {said}; {KNOWN}"
    found = python(code + "; print('horovod' in s.modules)", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.split() == ["True", "False", "False"]
