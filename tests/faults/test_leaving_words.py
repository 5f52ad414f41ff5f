"""A rank that leaves because of an exception is quoted to ranks that wait for it, on its node or on
others; one that closes its communicator early is said to have done that."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm, PeerLost
from hsgd.base.closing import describe_failure
from outcomes import outcomes_of
from pretended_nodes import meet
from ranks import Ranks, Seat

__all__: list[str] = []

SIZE = 3
MOST_RANKS = SIZE
CLOSED = "closed its communicator"
RAISED = "raised ValueError: bad batch"


def in_a_block(make: Callable[[], Comm]) -> None:
    with make():
        raise ValueError("bad\nbatch")


def in_a_block_that_ends(make: Callable[[], Comm]) -> None:
    with make():
        sys.exit(0)


def before_finally(make: Callable[[], Comm]) -> None:
    comm = make()
    try:
        raise ValueError("bad batch")
    finally:
        comm.close()


def before_leave(make: Callable[[], Comm]) -> None:
    comm = make()
    try:
        raise ValueError("bad batch")
    except ValueError:
        comm.leave()


def after_an_error_was_handled(make: Callable[[], Comm]) -> None:
    comm = make()
    with contextlib.suppress(ValueError):
        raise ValueError("bad batch")
    comm.close()


def while_an_older_error_is_handled(make: Callable[[], Comm]) -> None:
    try:
        raise ValueError("bad batch")
    except ValueError:
        make().close()


WAYS = [
    (in_a_block, RAISED),
    (before_finally, RAISED),
    (before_leave, RAISED),
    (in_a_block_that_ends, CLOSED),
    (after_an_error_was_handled, CLOSED),
    (while_an_older_error_is_handled, CLOSED),
]


def told(seat: Seat, folder: str, nodes: list[int], way: Callable[..., None]) -> str | None:
    def make() -> Comm:
        comm = meet(seat, folder, nodes)
        comm.barrier()
        return comm

    if seat.rank == 1:
        with contextlib.suppress(ValueError, SystemExit):
            way(make)
        return None
    comm = make()
    with pytest.raises(PeerLost) as raised:
        comm.allreduce(np.ones(3))
    assert raised.value.rank == 1
    line = str(raised.value)
    comm.close()
    return line


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize(("way", "words"), WAYS)
def test_a_rank_that_leaves_by_an_exception_is_quoted(
    ranks: Ranks, tmp_path: Path, nodes: list[int], way: Callable[..., None], words: str
) -> None:
    first, _, last = ranks.run(told, str(tmp_path), nodes, way)
    for line in (first, last):
        assert line.endswith(f") {words}") and "rank 1 (pid " in line


PROGRAMS = {
    "Comm": """
import sys, numpy as np
from hsgd import Comm
comm = Comm.local(sys.argv[2], int(sys.argv[1]), 2)
comm.barrier()
if comm.rank == 1:
    raise ValueError("bad batch")
comm.barrier()
""",
    "hsgd.torch": """
import sys, torch
import hsgd.torch as hvd
from hsgd import Comm
hvd.init(Comm.local(sys.argv[2], int(sys.argv[1]), 2))
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
plain = torch.optim.SGD(model.parameters(), 0.1)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
for step in range(3):
    if step == 2 and hvd.rank() == 1:
        raise ValueError("bad batch")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
""",
    "torch.distributed": """
import sys, torch, torch.distributed as dist
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("hsgd", store=store, rank=int(sys.argv[1]), world_size=2)
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(3))
""",
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exception_that_ends_the_program_is_quoted(name: str, tmp_path: Path) -> None:
    ranks = outcomes_of(PROGRAMS[name], str(tmp_path / "meet"))
    outputs = [rank.stderr for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert outputs[1].rstrip().endswith("ValueError: bad batch")
    assert f") {RAISED}" in outputs[0] and CLOSED not in outputs[0]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(), "raised ValueError"),
        (KeyError("a"), "raised KeyError: 'a'"),
        (ValueError("one\n  two\t"), "raised ValueError: one two"),
        (ValueError("x" * 1000), "raised ValueError: " + "x" * 160 + "..."),
        (OSError("no file a\udcff"), "raised OSError: no file a\\udcff"),
        (Unspeakable(), "raised Unspeakable"),
    ],
)
def test_an_error_is_described_on_one_line(error: Any, words: str) -> None:
    assert describe_failure(error) == words
