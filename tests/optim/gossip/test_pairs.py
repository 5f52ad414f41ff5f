"""Averaging in pairs: exact sums, whatever the timing, and nobody waits for a peer."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hsgd.config import Config
from hsgd.errors import CollectiveTimeout
from hsgd.optim.gossip.pair_averaging import PairAverager
from pair_fault_programs import AVERAGES, total
from pair_programs import average_at_random, complete, conserved
from ranks import Ranks, Seat, meeting_point
from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

PROGRAM = Path(__file__).resolve().with_name("pair_programs.py")
FAULTS = str(PROGRAM.with_name("pair_fault_programs.py"))


def at_random(seat: Seat, path: str, size: int, asks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return average_at_random(seat.comm(path, size), asks)


@pytest.mark.long
@pytest.mark.parametrize("size", short_form("chaos", [2, 3, 5, 8], keep=[1]))
def test_25_000_exchanges_at_random_neither_lock_nor_change_the_sum(
    pools: Callable[[int], Ranks], size: int
) -> None:
    asks = math.ceil(25_000 / size)
    outcomes = pools(size).run(at_random, meeting_point(), size, asks, limit_s=300)
    assert conserved(outcomes)
    assert sum(one["asked"] for one in outcomes) >= 25_000
    for one in outcomes:
        assert one["asked"] == one["committed"] + one["refused"] and one["committed"] > 0


def leave_early(seat: Seat, path: str, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    return average_at_random(seat.comm(path, size), 100 + 300 * seat.rank, stay=False)


@pytest.mark.long
def test_ranks_that_leave_early_take_their_half_along(pools: Callable[[int], Ranks]) -> None:
    outcomes = pools(3).run(leave_early, meeting_point(), 3)
    assert conserved(outcomes) and outcomes[2]["lost"] == [0, 1]


@pytest.mark.long
def test_over_mpi_the_sum_is_the_same(mpirun: Callable[..., Any]) -> None:
    done = mpirun(3, PROGRAM, "300")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["conserved"] and report["asked"] == report["committed"] + report["refused"] == 900
    assert report["committed"] > 100


def at_random_over_sockets(seat: Seat, path: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return average_at_random(seat.comm(path, 3), 200, network="sockets", remote_only=True)


def test_over_sockets_the_sum_is_the_same(pools: Callable[[int], Ranks]) -> None:
    outcomes = pools(3).run(at_random_over_sockets, meeting_point())
    assert conserved(outcomes)
    for one in outcomes:
        assert one["asked"] == one["committed"] + one["refused"] == 200 and one["committed"] > 10


def cross(seat: Seat, path: str, first: str, options: dict[str, Any]) -> list[float]:
    """Both ask before either looks; then they look in a given order."""
    comm = seat.comm(path, 2)
    weights = [torch.full((3,), 8.0 * seat.rank)]
    pairs = PairAverager(comm, weights, complete(2), **options)
    assert pairs.ask(1 - seat.rank)
    comm.barrier()
    for looks in first:
        if int(looks) == seat.rank:
            pairs.poll()
        comm.barrier()
    pairs.close()
    return weights[0].tolist()


@pytest.mark.parametrize("order", ["0101", "1010", "0011", "1100"])
def test_two_that_ask_each_other_average_and_do_not_swap(
    pools: Callable[[int], Ranks], order: str
) -> None:
    for options in ({}, {"network": "sockets", "remote_only": True}):
        assert pools(2).run(cross, meeting_point(), order, options) == [[4.0] * 3] * 2


def cross_between_nodes(
    seat: Seat, path: str, start: tuple[float, float], wire: torch.dtype | None
) -> tuple[list[float], list[tuple[bool, bool]], int, float]:
    """Both ask before either looks, and go on meanwhile."""
    comm = seat.comm(path, 2)
    weights = [torch.full((3,), start[seat.rank])]
    options = {"network": "sockets", "remote_only": True, "wire_dtype": wire}
    pairs = PairAverager(comm, weights, complete(2), **options)
    assert pairs.ask(1 - seat.rank)
    comm.barrier()
    weights[0] += 1
    done = pairs.wait(30)
    sent = pairs.traffic.remote_bytes
    done += pairs.close()
    reports = [(entry.asked, entry.committed) for entry in done]
    return weights[0].tolist(), reports, sent, done[0].distance


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_between_nodes_requests_that_cross_are_one_average_and_send_nothing_back(
    pools: Callable[[int], Ranks], wire: torch.dtype | None
) -> None:
    ends = pools(2).run(cross_between_nodes, meeting_point(), (0.0, 8.0), wire)
    for weights, report, sent, distance in ends:
        # each asked, which cost one lane, and each has one average of what was sent
        assert weights == [5.0] * 3 and report == [(True, True)]
        assert sent == 64 and math.isclose(distance, 8 * 3**0.5, rel_tol=1e-6)


@pytest.mark.parametrize("start", [(math.nan, 1.0), (1.0, math.nan)])
def test_requests_that_cross_with_weights_that_are_not_finite_are_both_refused(
    pools: Callable[[int], Ranks], start: tuple[float, float]
) -> None:
    ends = pools(2).run(cross_between_nodes, meeting_point(), start, None)
    for rank, (weights, report, _, _) in enumerate(ends):
        assert weights == [2.0] * 3 or math.isnan(start[rank])
        assert (True, False) in report and not any(committed for _, committed in report)


def be_late(seat: Seat, path: str, ways: str) -> tuple[list[int], list[bool]]:
    """Rank 1 does not look while rank 0 waits, goes on and changes its weights."""
    comm = seat.comm(path, 2)
    weights = [torch.arange(5) * (1 + 2 * seat.rank)]
    pairs = PairAverager(comm, weights, complete(2))
    reports = []
    if seat.rank == 0:
        assert pairs.ask(1) and not pairs.ask(1)
        reports.append(bool(pairs.wait(0.02)))  # in vain
        weights[0] += 100
    comm.barrier()
    if ways == "answers" and seat.rank == 1:
        reports.append(pairs.poll()[0].committed)
    comm.barrier()
    if ways == "answers" and seat.rank == 0:
        reports.append(pairs.poll()[0].committed)
    reports += [entry.committed for entry in pairs.close()]
    return weights[0].tolist(), reports


@pytest.mark.parametrize("ways", ["answers", "leaves"])
def test_a_late_side_still_applies_its_half(pools: Callable[[int], Ranks], ways: str) -> None:
    (one, reports), (other, _) = pools(2).run(be_late, meeting_point(), ways)
    assert [a + b for a, b in zip(one, other, strict=True)] == [100 + 4 * k for k in range(5)]
    assert reports == [False, True]
    assert [b - (one[k] - 100) for k, b in enumerate(other)] == [0] * 5


def stand_still(seat: Seat, path: str) -> tuple[Any, ...]:
    comm = seat.comm(path, 3, Config(timeout_s=1.0))
    weights = [torch.tensor([10 * seat.rank + 1])]
    pairs = PairAverager(comm, weights, complete(3), lanes=1)
    comm.barrier()
    if seat.rank == 2:
        seat.tell("made")
        assert seat.pipe.recv() == "too late"
        return [entry.committed for entry in pairs.poll()], "", int(weights[0])
    seat.tell("made")
    assert seat.pipe.recv() == "go"
    if seat.rank == 0:
        assert pairs.ask(2) and not pairs.ask(1)  # its only lane is in use
    asked = seat.rank == 0 or pairs.ask(0)
    deadline = time.monotonic() + 20
    done: list[Any] = []
    while asked and not done and time.monotonic() < deadline:
        done = pairs.wait(0.01)
    try:
        pairs.close()
    except CollectiveTimeout as error:
        return [entry.committed for entry in done], str(error), int(weights[0])
    return [entry.committed for entry in done], "", int(weights[0])


def test_a_peer_that_stands_still_delays_nobody_and_is_named_in_the_end() -> None:
    with Ranks(3) as pool:
        pool.start(stand_still, meeting_point())
        assert [pool.hear(rank) for rank in range(3)] == ["made"] * 3
        pool.signal(2, signal.SIGSTOP)
        for rank in (0, 1):
            pool.send(rank, "go")
        first, second = (outcome.value for outcome in pool.finish(on=(0, 1)))
        pool.signal(2, signal.SIGCONT)
        pool.send(2, "too late")
        assert pool.finish(on=(2,))[0].value == ([], "", 21)  # who gave up applies no half either
    assert first[0] == [True] and second[:2] == ([True], "")
    assert first[2] + second[2] == 1 + 11  # a pair that timed out has changed no sum
    assert "rank 2 has not answered rank 0 within 1 s" in first[1] and "\n" not in first[1]


def ask_the_stopped_first(seat: Seat, path: str) -> list[int]:
    comm = seat.comm(path, 4)
    weights = [torch.tensor([seat.rank])]
    pairs = PairAverager(comm, weights, complete(4))
    comm.barrier()
    seat.tell("made")
    assert seat.pipe.recv() == "go"
    if seat.rank == 0:
        assert pairs.ask(2) and pairs.ask(3)
    met = 0
    deadline = time.monotonic() + 50
    while seat.rank < 2 and not seat.pipe.poll() and time.monotonic() < deadline:
        pairs.ask(1 - seat.rank)
        before, done = met, pairs.wait(0.01)
        met += sum(entry.committed and entry.asked for entry in done)
        if before < 10 <= met:
            seat.tell("met")
    assert seat.pipe.recv() == "all awake"
    here = comm.barrier_async()
    while not here.done():
        pairs.poll()
        time.sleep(1e-4)
    here.wait()
    pairs.close()
    return [*weights[0].tolist(), met]


def test_two_peers_that_stand_still_leave_a_lane_for_the_third() -> None:
    with Ranks(4) as pool:
        pool.start(ask_the_stopped_first, meeting_point())
        assert [pool.hear(rank) for rank in range(4)] == ["made"] * 4
        for rank in (2, 3):
            pool.signal(rank, signal.SIGSTOP)
        for rank in range(4):
            pool.send(rank, "go")
        assert [pool.hear(rank) for rank in (0, 1)] == ["met"] * 2
        for rank in (2, 3):
            pool.signal(rank, signal.SIGCONT)
        for rank in range(4):
            pool.send(rank, "all awake")
        ends = [outcome.value for outcome in pool.finish()]
    assert ends[0][1] >= 10 <= ends[1][1] and sum(end[0] for end in ends) == 0 + 1 + 2 + 3


@pytest.mark.long
def test_a_stalled_rank_on_another_node_is_waited_for_by_nobody_and_then_takes_part(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    done = cluster(3).mpirun(3, [sys.executable, FAULTS, "stalled", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is True  # the sum is what it was
    for rank in (0, 1):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["averages"] >= AVERAGES and 2 in report["open"] and not report["lost"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "killed-asking"])
def test_a_killed_rank_on_another_node_is_left_out(
    cluster: Callable[..., Cluster], tmp_path: Path, how: str
) -> None:
    program = [sys.executable, FAULTS, how, str(tmp_path)]
    done = cluster(3).mpirun(3, program, options=("--with-ft", "ulfm"))  # the others live
    assert done.returncode != 0
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for one in reports:
        assert one["averages"] >= AVERAGES and not one["open"]
        assert "rank 2 on another node died" in one["lost"]["2"]
    for k, wanted in enumerate(total(2)):  # nobody has applied half of an average with it
        assert (torch.tensor([one["weights"][k] for one in reports]).sum(0) == wanted).all()


def average_until_told(seat: Seat, path: str, size: int) -> tuple[dict[int, str], int]:
    comm = seat.comm(path, size)
    weights = [torch.tensor([1.0 + seat.rank])]
    pairs = PairAverager(comm, weights, complete(size))
    seat.tell("begins")
    turn, after = 0, 0
    deadline = time.monotonic() + 50
    while not seat.pipe.poll() and time.monotonic() < deadline:
        turn += 1
        pairs.ask(complete(size)[seat.rank][turn % (size - 1)])
        done = pairs.wait(0.01)
        before, after = after, after + sum(entry.committed for entry in done if pairs.lost)
        if before < 50 <= after:
            seat.tell("goes on")
    assert seat.pipe.recv() == "enough"
    pairs.close()
    return pairs.lost, after


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_peer_is_left_out_and_the_others_go_on(victim: int) -> None:
    with Ranks(3) as pool:
        pool.start(average_until_told, meeting_point(), 3)
        assert [pool.hear(rank) for rank in range(3)] == ["begins"] * 3
        pid = pool.pid(victim)
        pool.signal(victim, signal.SIGKILL)
        alive = [rank for rank in range(3) if rank != victim]
        assert [pool.hear(rank) for rank in alive] == ["goes on"] * 2
        for rank in alive:
            pool.send(rank, "enough")
        for outcome in pool.finish(on=alive):
            assert outcome.error is None, outcome.trace
            lost, after = outcome.value
            assert f"rank {victim} (pid {pid}, " in lost[victim] and after >= 50


def diverge(seat: Seat, path: str) -> tuple[list[float], list[bool]]:
    comm = seat.comm(path, 2)
    weights = [torch.full((4,), math.nan if seat.rank else 1.0)]
    pairs = PairAverager(comm, weights, complete(2))
    reports = []
    for asker in (0, 1):
        if seat.rank == asker:
            pairs.ask(1 - asker)
        comm.barrier()
        reports += [entry.committed for entry in pairs.poll()]
        comm.barrier()
    pairs.close()
    return weights[0].tolist(), reports


def test_weights_that_are_not_finite_stay_where_they_are(pools: Callable[[int], Ranks]) -> None:
    (healthy, reports), (_, also) = pools(2).run(diverge, meeting_point())
    assert healthy == [1.0] * 4 and not any([*reports, *also])


def round_off(seat: Seat, path: str, wire: torch.dtype | None) -> tuple[list[float], int]:
    comm = seat.comm(path, 2)
    draw = torch.Generator().manual_seed(seat.rank)
    # multiples of 2^-8 below 1: sums in float32 are exact, halves in bfloat16 are not
    weights = [torch.randint(-256, 256, (100,), generator=draw) / 256.0]
    pairs = PairAverager(comm, weights, complete(2), wire_dtype=wire)
    for _ in range(3):
        if seat.rank == 0:
            pairs.ask(1)
        comm.barrier()
        pairs.poll()
        comm.barrier()
        pairs.poll()
    pairs.close()
    return weights[0].tolist(), pairs.model_bytes


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
def test_rounding_on_the_way_keeps_the_sum(
    pools: Callable[[int], Ranks], wire: torch.dtype | None
) -> None:
    starts = [
        torch.randint(-256, 256, (100,), generator=torch.Generator().manual_seed(r)) / 256.0
        for r in range(2)
    ]
    (one, size), (other, _) = pools(2).run(round_off, meeting_point(), wire)
    found = torch.tensor(one, dtype=torch.float64) + torch.tensor(other, dtype=torch.float64)
    assert torch.equal(found, (starts[0] + starts[1]).double())
    assert size == (400 if wire is None else 200)
    distance = (torch.tensor(one) - torch.tensor(other)).abs().max()
    assert distance <= (0 if wire is None else 0.01)


def drift_apart(seat: Seat, path: str, wire: torch.dtype | None) -> tuple[float, list[float]]:
    comm = seat.comm(path, 2)
    dtype = torch.float16 if wire is None else torch.float32
    weights = [torch.full((4,), 2048.0 * seat.rank, dtype=dtype)]
    pairs = PairAverager(comm, weights, complete(2), wire_dtype=wire)
    if seat.rank == 0:
        pairs.ask(1)
    comm.barrier()
    done = pairs.poll()
    comm.barrier()
    done += pairs.poll()
    pairs.close()
    return done[0].distance, weights[0].tolist()


@pytest.mark.parametrize("wire", [None, torch.float16])
def test_16_bits_whose_squares_would_not_fit_are_averaged_too(
    pools: Callable[[int], Ranks], wire: torch.dtype | None
) -> None:
    for distance, weights in pools(2).run(drift_apart, meeting_point(), wire):
        assert distance == 4096.0 and weights == [1024.0] * 4


def misuse(seat: Seat, path: str) -> list[str]:
    comm, lines = seat.comm(path, 1), []
    for weights, more in (
        ([torch.zeros(2, 2)], {}),
        ([torch.zeros(4)[::2]], {}),
        ([torch.zeros(2)], {"lanes": 0}),
    ):
        with pytest.raises(ValueError, match="PairAverager: ") as caught:
            PairAverager(comm, weights, [[]], **more)
        lines.append(str(caught.value))
    return lines


def test_misuse_is_refused_by_name(pools: Callable[[int], Ranks]) -> None:
    (lines,) = pools(1).run(misuse, meeting_point())
    for line, part in zip(lines, ("shape (2, 2)", "flatten it", "lanes is 0"), strict=True):
        assert part in line and "\n" not in line
