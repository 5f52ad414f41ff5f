"""Sub-communicators: who is in them, and what happens when one cannot be made.

Communicators over MPI are split in test_comm_mpi.py, by the same checks.
"""

from __future__ import annotations

import contextlib
import select
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsgd import Comm, HsgdError, PeerLost, SignatureMismatch
from parts import Choice, members, split_and_check, together
from ranks import PATIENT, Ranks, Seat, meeting_point
from toolkit.few_descriptors import few_descriptors
from wrong_calls import refused_alone

__all__: list[str] = []

MOST_RANKS = 4
LEAST_KEY, MOST = -(2**31) + 1, 2**31 - 1


@pytest.fixture(scope="module")
def paths() -> dict[int, str]:
    return {size: meeting_point() for size in range(1, MOST_RANKS + 1)}


COLORS = st.sampled_from([None, -1, -7, 0, 1, 2, MOST])
KEYS = st.sampled_from([LEAST_KEY, -3, 0, 0, 1, MOST])


def do_split_twice(
    seat: Seat, path: str, first: list[Choice], second: list[Choice], early: bool
) -> list[str]:
    """A split of a split, beside its parents; `early`: the parent of a part is closed before it."""
    comm = seat.comm(path, len(first))
    handle = comm.allreduce_async(np.ones(1000))
    part, wrong = split_and_check(comm, first)
    if not handle.done():
        wrong.append("the split overtook an asynchronous call")
    if part is not None:
        leaf, more = split_and_check(part, second[: part.size])
        if early:
            part.close()
        both = {1: leaf, 2: part}
        open_comms = {mark: each for mark, each in both.items() if each and not each.closed}
        wrong += more + together(open_comms, 6)
        for each in open_comms.values():
            each.close()
    if handle.wait()[0] != comm.size or comm.allreduce(np.ones(3))[0] != comm.size:
        wrong.append("the whole communicator does not work any more")
    return wrong


@pytest.mark.long
@settings(max_examples=150, derandomize=True, database=None)
@given(data=st.data())
def test_parts_have_the_ranks_of_a_color_by_key_and_rank(
    ranks: Ranks, paths: dict[int, str], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, MOST_RANKS), label="ranks")
    choices = st.lists(st.tuples(COLORS, KEYS), min_size=size, max_size=size)
    first, second = data.draw(choices, label="first"), data.draw(choices, label="second")
    early = data.draw(st.booleans(), label="early")
    args = (paths[size], first, second, early)
    assert ranks.run(do_split_twice, *args, on=range(size)) == [[]] * size


def test_the_expectation_itself_is_that_of_mpi() -> None:
    choices: list[Choice] = [(1, 5), (0, 0), (1, -2), (None, 0), (1, 5), (-3, 1)]
    found = [members(choices, rank) for rank in range(len(choices))]
    assert found == [[2, 0, 4], [1], [2, 0, 4], [], [2, 0, 4], []]


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "large color": (2**31, 0, ValueError, "color is 2147483648"),
    "large key": (0, 2**31, ValueError, "key is 2147483648"),
    "small key": (0, -(2**31), ValueError, "key is -2147483648"),
    "float": (0.5, 0, TypeError, "float"),
    "text": ("red", 0, TypeError, "str"),
    "no key": (0, None, TypeError, "NoneType"),
}


def do_wrong(seat: Seat, path: str, wrong: str) -> str:
    color, key, kind, _ = WRONG[wrong]
    return refused_alone(seat, path, lambda comm: comm.split(color, key), kind)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_color_or_key_is_refused_and_nothing_is_sent(
    ranks: Ranks, paths: dict[int, str], wrong: str
) -> None:
    assert WRONG[wrong][3] in ranks.run(do_wrong, paths[2], wrong, on=range(2))[1]


def do_call_something_else(seat: Seat, path: str, call: str) -> str:
    comm = seat.comm(path, 3)
    others: dict[str, Callable[[], Any]] = {
        "barrier": comm.barrier,
        "allreduce": lambda: comm.allreduce(np.zeros(2, "int64")),
    }
    with pytest.raises(SignatureMismatch) as caught:
        others[call]() if seat.rank == 2 else comm.split(0)
    comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("call", ["barrier", "allreduce"])
def test_a_rank_that_calls_something_else_is_told_apart(ranks: Ranks, call: str) -> None:
    reports = ranks.run(do_call_something_else, meeting_point(), call, on=range(3))
    assert len(set(reports)) == 1 and '"split"' in reports[0] and "rank 2 " in reports[0]


def do_split_without_descriptors(seat: Seat, path: str, poor: int) -> str:
    """Ranks 0 and 1 belong together, and 2 and 3; one of the first two has no descriptors left."""
    comm = seat.comm(path, MOST_RANKS)
    line, named = "", poor
    with few_descriptors(2) if seat.rank == poor else contextlib.nullcontext():
        try:
            part = comm.split(seat.rank // 2)
            assert part is not None
            assert part.allreduce(np.ones(3)).tolist() == [2.0] * 3
            part.close()
        except HsgdError as error:
            line, named = str(error), error.rank
    assert named == poor
    again = comm.split(seat.rank // 2)
    assert again is not None
    with again:
        assert again.allreduce(np.ones(3)).tolist() == [2.0] * 3
    return line


@pytest.mark.parametrize("poor", [0, 1])
def test_who_cannot_take_part_is_named_to_its_color_and_others_go_on(
    ranks: Ranks, poor: int
) -> None:
    reports = ranks.run(do_split_without_descriptors, meeting_point(), poor)
    assert reports[2:] == ["", ""]
    assert reports[0] == reports[1]
    assert reports[0].startswith(f"split: rank {poor} cannot take part: ")
    assert "file descriptors" in reports[0] and "ulimit -n" in reports[0]


def do_split_until_lost(seat: Seat, path: str, size: int) -> str:
    comm = seat.comm(path, size)
    seat.tell("ready")
    seat.pipe.recv()
    try:
        while True:
            part = comm.split(0)
            assert part is not None
            part.close()
    except HsgdError as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_in_a_split_is_named_to_all(size: int, victim: str) -> None:
    killed = 0 if victim == "first" else size - 1
    with Ranks(size) as pool:
        pool.start(do_split_until_lost, meeting_point(), size)
        for rank in range(size):
            pool.hear(rank)
        for rank in range(size):
            pool.send(rank, "go")
        select.select([], [], [], 0.05)  # some splits into the loop; any moment will do
        pool.signal(killed, signal.SIGKILL)
        for outcome in pool.finish(on=set(range(size)) - {killed}):
            assert outcome.error is None, outcome.trace
            kind, _, line = outcome.value.partition(" ")
            assert kind == "PeerLost" and f"rank {killed} " in line
            assert outcome.seconds < PATIENT.timeout_s / 2


def do_break_the_whole(seat: Seat, path: str) -> float:
    """A part lives on its own: its parent may break, or be closed."""
    comm = Comm.local(path, seat.rank, 3, PATIENT)
    part = comm.split(seat.rank // 2)
    assert part is not None
    if seat.rank == 2:
        comm.close()
    else:
        with pytest.raises(PeerLost):
            comm.barrier()
        with pytest.raises(HsgdError, match="broken since an earlier error"):
            comm.split(0)
        comm.close()
    with pytest.raises(HsgdError, match="closed"):
        comm.split(0)
    with part:
        assert part.allreduce(np.ones(3))[0] == part.size
        leaf = part.split(0)
        assert leaf is not None
        with leaf:
            return float(leaf.allreduce(np.ones(70_000))[-1])


def test_a_part_does_not_depend_on_the_whole(ranks: Ranks) -> None:
    assert ranks.run(do_break_the_whole, meeting_point(), on=range(3)) == [2.0, 2.0, 1.0]
