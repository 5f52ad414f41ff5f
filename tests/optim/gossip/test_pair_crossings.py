"""Requests that cross between nodes are one average, whatever happens to one of the two ranks.

Ranks 0 and 1 ask each other before either looks, over sockets; rank 2 averages with both. At each
point of the protocol one of the two is killed, or stands still until the others have gone on
without it, or until the other has given up. The weights are integers, so sums are exact.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hsgd.errors import CollectiveTimeout
from hsgd.optim.gossip.pair_averaging import Averaged, PairAverager
from pair_programs import average_at_random, complete, conserved, start_weights
from ranks import Ranks, Seat, meeting_point

__all__: list[str] = []

MET = 20  # averages of those who go on without the third
PATIENT_S = 30.0
GIVES_UP_S = 0.5


class Point(NamedTuple):
    """Where the victim stands; the lower rank is 0."""

    name: str
    victim: int
    looks: str = ""  # ranks that look before, in this order
    before_it_says_so: bool = False  # the last look ends between the half and the word


POINTS = [
    Point("the lower has asked", 0),
    Point("the lower has put the other off", 0, "0"),
    Point("the lower has its half", 0, "10", before_it_says_so=True),
    Point("the lower has said so", 0, "10"),
    Point("the higher has asked", 1),
    Point("the higher has its half", 1, "1", before_it_says_so=True),
    Point("the higher has said so", 1, "1"),
]
every_point = pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)


def starts() -> list[list[Tensor]]:
    return [start_weights(rank) for rank in range(3)]


def half(k: int) -> Tensor:
    """What the higher rank adds, and the lower takes away, of tensor k."""
    lower, higher, _ = starts()
    return (lower[k] - higher[k]) // 2


def sums(weights: list[list[list[int]]]) -> list[Tensor]:
    return [torch.tensor([one[k] for one in weights]).sum(0) for k in range(2)]


def whole() -> list[Tensor]:
    return sums([[tensor.tolist() for tensor in start] for start in starts()])


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


class Part:
    """What a rank does, order by order, until it closes."""

    def __init__(self, seat: Seat, path: str, point: Point, timeout_s: float) -> None:
        torch.set_num_threads(1)
        self.seat, self.point = seat, point
        self.comm = seat.comm(path, 3)
        self.weights = start_weights(seat.rank)
        self.pairs = PairAverager(
            self.comm,
            self.weights,
            complete(3),
            network="sockets",
            remote_only=True,
            timeout_s=timeout_s,
        )
        self.done: list[Averaged] = []
        if seat.rank != 2:
            assert self.pairs.ask(1 - seat.rank)
            self.pairs._window.drain(PATIENT_S)
        seat.tell("asked")

    def look(self) -> None:
        """Once. Who stops before it says so has taken its half, and waits for "go on"."""
        pairs, send = self.pairs, self.pairs._send

        def stop_before_the_first(*args: Any) -> int:
            pairs._send = send  # type: ignore[method-assign]
            self.seat.tell("has its half")
            assert self.seat.pipe.recv() == "go on"
            return send(*args)

        if self.point.before_it_says_so and self.seat.rank == self.point.victim:
            pairs._send = stop_before_the_first  # type: ignore[method-assign]
        self.done += pairs.poll()
        self.pairs._window.drain(PATIENT_S)
        self.seat.tell("has looked")

    def meet(self, without_the_dead: bool) -> None:
        """Average with the other who is awake, and try the victim, until told to go on."""
        victim, pairs = self.point.victim, self.pairs
        (other,) = {0, 1, 2} - {victim, self.seat.rank}
        met, informed, deadline = 0, False, time.monotonic() + 50
        while not self.seat.pipe.poll() and time.monotonic() < deadline:
            pairs.ask(other)
            pairs.ask(victim)
            done = pairs.wait(0.01)
            met += sum(entry.committed and entry.peer == other for entry in done)
            self.done += done
            knows = victim in pairs.lost and victim not in pairs.open
            if not informed and met >= MET and (knows or not without_the_dead):
                self.seat.tell("met")
                informed = True

    def settle(self) -> None:
        """All are awake: nothing stays open."""
        self.done += self.pairs.wait(PATIENT_S)
        here = self.comm.barrier_async()
        while not here.done():
            self.done += self.pairs.poll()
            time.sleep(1e-4)
        here.wait()

    def hear_that_it_left(self, peer: int) -> None:
        deadline = time.monotonic() + PATIENT_S
        while not self.pairs._left(peer) and time.monotonic() < deadline:
            time.sleep(1e-3)

    def end(self) -> dict[str, Any]:
        error = ""
        try:
            self.done += self.pairs.close()
        except CollectiveTimeout as caught:
            error = str(caught)
        return {
            "weights": [tensor.tolist() for tensor in self.weights],
            "done": [(entry.peer, entry.committed) for entry in self.done],
            "lost": self.pairs.lost,
            "error": error,
        }


def take_part(seat: Seat, path: str, point: Point, timeout_s: float = PATIENT_S) -> dict[str, Any]:
    part = Part(seat, path, point, timeout_s)
    while (order := seat.pipe.recv()) != "close":
        name, *args = order
        getattr(part, name)(*args)
    return part.end()


def bring_to(pool: Ranks, point: Point, timeout_s: float = PATIENT_S) -> None:
    """All ranks begin, and the victim comes to its point."""
    pool.start(take_part, meeting_point(), point, timeout_s)
    assert [pool.hear(rank) for rank in range(3)] == ["asked"] * 3
    for rank in map(int, point.looks):
        pool.send(rank, ("look",))
        last = rank == point.victim
        wanted = "has its half" if last and point.before_it_says_so else "has looked"
        assert pool.hear(rank) == wanted


def let_others_meet(pool: Ranks, point: Point, without_the_dead: bool) -> list[int]:
    others = [rank for rank in range(3) if rank != point.victim]
    for rank in others:
        pool.send(rank, ("meet", without_the_dead))
    assert [pool.hear(rank) for rank in others] == ["met"] * 2
    return others


def wake(pool: Ranks, point: Point) -> None:
    pool.signal(point.victim, signal.SIGCONT)
    if point.before_it_says_so:
        pool.send(point.victim, "go on")
        assert pool.hear(point.victim) == "has looked"


@every_point
def test_a_killed_rank_is_left_out_and_its_request_is_averaged_once_or_not(point: Point) -> None:
    with Ranks(3) as pool:
        bring_to(pool, point)
        pool.signal(point.victim, signal.SIGKILL)
        others = let_others_meet(pool, point, without_the_dead=True)
        for rank in others:
            pool.send(rank, "close")
        ends = [outcome.value for outcome in pool.finish(on=others)]
    # The higher rank averages with what the dead had sent; the lower, if the higher has said so.
    halves = 1 if point.victim == 0 else -1 if point.name == "the higher has said so" else 0
    for k, found in enumerate(sums([end["weights"] for end in ends])):
        wanted = sum(starts()[rank][k] for rank in others) + halves * half(k)
        assert torch.equal(found, wanted)
    for end in ends:
        assert f"rank {point.victim} (pid " in end["lost"][point.victim]
        assert end["done"].count((point.victim, True)) <= abs(halves) and not end["error"]


@every_point
def test_who_stands_still_delays_nobody_and_takes_its_half_in_the_end(
    pool: Ranks, point: Point
) -> None:
    bring_to(pool, point)
    pool.stop(point.victim)
    others = let_others_meet(pool, point, without_the_dead=False)
    wake(pool, point)
    for rank in range(3):
        pool.send(rank, ("settle",))
        pool.send(rank, "close")
    ends = [outcome.value for outcome in pool.finish()]
    for found, wanted in zip(sums([end["weights"] for end in ends]), whole(), strict=True):
        assert torch.equal(found, wanted)
    for rank in (0, 1):
        assert (1 - rank, True) in ends[rank]["done"]
    assert not any(end["error"] or end["lost"] for end in (ends[rank] for rank in others))


@every_point
def test_who_gives_up_says_so_and_without_that_no_sum_has_changed(
    pool: Ranks, point: Point
) -> None:
    bring_to(pool, point, GIVES_UP_S)
    pool.stop(point.victim)
    other = 1 - point.victim
    pool.send(other, "close")
    gave_up = pool.finish(on=(other,))[0].value
    wake(pool, point)
    pool.send(point.victim, ("hear_that_it_left", other))
    for rank in (point.victim, 2):
        pool.send(rank, "close")
    rest = [outcome.value for outcome in pool.finish(on=(point.victim, 2))]
    knows = point.name.endswith("has said so")
    assert (f"rank {point.victim} has not answered rank {other}" in gave_up["error"]) != knows
    # The higher rank alone has its half where the lower gave up before it heard of it.
    alone = point.name == "the higher has its half"
    found = sums([end["weights"] for end in (gave_up, *rest)])
    for k, wanted in enumerate(whole()):
        assert torch.equal(found[k], wanted + (half(k) if alone else 0))
    assert (not alone) or "may have changed by one half" in gave_up["error"]
    assert not any(end["error"] for end in rest)


def meet_once(pairs: PairAverager, *, asks: bool) -> None:
    """Average with the other of two ranks of which one asks."""
    deadline = time.monotonic() + PATIENT_S
    if asks:
        assert pairs.ask(0)
    while not pairs.poll():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    pairs._window.drain(PATIENT_S)


def leave_a_half(seat: Seat, path: str) -> tuple[list[int], str]:
    comm = seat.comm(path, 3)
    weights = [torch.tensor([10 * seat.rank])]
    options: dict[str, Any] = {"network": "sockets", "remote_only": True, "timeout_s": GIVES_UP_S}
    pairs = PairAverager(comm, weights, complete(3), **options)
    if seat.rank < 2:  # connected both ways: a connection to one that is stopped carries nothing
        meet_once(pairs, asks=seat.rank == 1)
        weights[0].fill_(10 * seat.rank)
    comm.barrier()
    if seat.rank == 0:
        assert pairs.ask(1)
        pairs._window.drain(PATIENT_S)
    seat.tell("asked")
    assert seat.pipe.recv() == "go on"
    deadline = time.monotonic() + PATIENT_S
    while seat.rank == 0 and not pairs._left(1) and time.monotonic() < deadline:
        time.sleep(1e-3)
    try:
        pairs.close()
    except CollectiveTimeout as error:
        return weights[0].tolist(), str(error)
    return weights[0].tolist(), ""


def test_who_leaves_a_half_that_was_not_taken_says_so(pool: Ranks) -> None:
    """It has no request open itself, and what it sent may never arrive."""
    pool.start(leave_a_half, meeting_point())
    assert [pool.hear(rank) for rank in range(3)] == ["asked"] * 3
    pool.stop(0)
    pool.send(1, "go on")
    left, report = pool.finish(on=(1,))[0].value
    pool.signal(0, signal.SIGCONT)
    for rank in (0, 2):
        pool.send(rank, "go on")
    (taken, error), (_, also) = (outcome.value for outcome in pool.finish(on=(0, 2)))
    assert (
        "rank 0 has not applied its half of an average with rank 1 within 0.5 s" in report
        and "\n" not in report
    )
    assert (left, taken) == ([5], [5]) and not error and not also


def average_with_delays(seat: Seat, path: str, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return average_at_random(
        seat.comm(path, size), 400, dawdle=True, network="sockets", remote_only=True
    )


def test_delays_at_every_message_change_no_sum(pool: Ranks) -> None:
    outcomes = pool.run(average_with_delays, meeting_point(), 3)
    assert conserved(outcomes)
    assert sum(one["crossed"] for one in outcomes) > 10
    for one in outcomes:
        assert one["asked"] == one["committed"] + one["refused"] == 400 and one["committed"] > 10
