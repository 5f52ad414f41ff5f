"""A rank is killed or stopped while the leaders of nodes connect over TCP, or while its node meets.

All other ranks name it, those that lead and those that wait for them, and leave nothing open. Nodes
are pretended, by a layout that is given instead of found.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import fault_points
import holdings
from hsgd.config import Config
from hsgd.errors import HsgdError
from pretended_nodes import meet
from ranks import Ranks, Seat
from tiers import short_form

__all__ = ["SCENARIOS"]

pytestmark = pytest.mark.long

DETECTED_S = 2.0
TIMEOUT_S = 1.0
STEP_S = 2 * TIMEOUT_S  # what the step of the meeting has in which leaders connect
FIXED = Config(timeout_s=TIMEOUT_S, store="ordinary", interfaces="lo")


class Scenario(NamedTuple):
    """Who comes to a point, and the node of each rank."""

    victim: int
    nodes: list[int]


class Told(NamedTuple):
    """How a rank learned that something is wrong, and what it still holds."""

    kind: str
    line: str
    rank: int
    when: float
    left: list[str]


TWO = [0, 0, 1, 1]
SCENARIOS = {
    "over TCP: connecting": [
        Scenario(0, TWO),  # tells the others what it gathers
        Scenario(2, TWO),  # connects to others
        Scenario(3, TWO),
        Scenario(1, [0, 1]),
        Scenario(1, [0, 1, 2]),  # between two others
    ],
}
# Leaders are connected then: the other node hears of it from the leader of the victim's.
IN_THE_MEETING = {
    "set-up: introduced": [Scenario(3, [0, 1, 0, 1]), Scenario(2, [0, 0, 0, 1])],
    "set-up: all have come": [Scenario(2, TWO)],
    "set-up: mapped": [Scenario(2, [0, 1, 0, 1]), Scenario(1, TWO), Scenario(3, [0, 1, 1, 1])],
    "header: open": [Scenario(2, [0, 1, 0, 1]), Scenario(3, TWO), Scenario(0, TWO)],
}
MEETINGS = [(point, each) for point, scenarios in IN_THE_MEETING.items() for each in scenarios]
CASES = [(point, each) for point, scenarios in SCENARIOS.items() for each in scenarios]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    fault_points.build()


def meet_until_told(
    seat: Seat, folder: str, point: str, scenario: Scenario, config: Config = FIXED, calls: int = 0
) -> Told | None:
    import torch.distributed  # noqa: F401  before what is open is counted

    fault_points.use()
    held = holdings.descriptors()
    told = None
    seat.wait_for_all()
    if seat.rank == scenario.victim:
        fault_points.on_visit(point, 1, lambda: (seat.tell("reached"), seat.pipe.recv()))
    try:
        with meet(seat, folder, scenario.nodes, config) as comm:
            for _ in range(calls):
                comm.barrier()
    except HsgdError as error:
        when = time.monotonic()
        told = Told(type(error).__name__, str(error), error.rank, when, [])
    return told and told._replace(left=what_is_left(held))


def what_is_left(held: set[str]) -> list[str]:
    """Sockets and epolls that were not there before; those of the store belong to torch."""
    kinds = ("socket:", "anon_inode:", "/memfd")
    return [what for what in holdings.descriptors_since(held) if what.startswith(kinds)]


def check_told(pool: Ranks, scenario: Scenario, fell: float) -> None:
    victim = scenario.victim
    for outcome in pool.finish(on=set(range(len(pool))) - {victim}):
        assert outcome.error is None, outcome.trace
        told = outcome.value
        assert told is not None, "met without the victim"
        assert told.kind in ("PeerLost", "CollectiveTimeout"), told
        assert told.rank == victim and f"rank {victim} " in told.line, told
        assert "\n" not in told.line
        assert told.left == [], told
        assert told.when - fell < STEP_S + DETECTED_S, told


@pytest.mark.parametrize(("point", "scenario"), short_form("chaos", CASES, keep=2))
def test_a_leader_killed_while_it_connects_is_named_by_all(
    tmp_path: Path, point: str, scenario: Scenario
) -> None:
    with Ranks(len(scenario.nodes)) as pool:
        pool.start(meet_until_told, str(tmp_path), point, scenario)
        pool.let_go()
        assert pool.hear(scenario.victim) == "reached"
        fell = time.monotonic()
        pool.signal(scenario.victim, signal.SIGKILL)
        check_told(pool, scenario, fell)


@pytest.mark.parametrize(("point", "scenario"), short_form("chaos", CASES, keep=2))
def test_a_leader_stopped_while_it_connects_is_named_by_all_and_learns_of_it(
    tmp_path: Path, point: str, scenario: Scenario
) -> None:
    with Ranks(len(scenario.nodes)) as pool:
        pool.start(meet_until_told, str(tmp_path), point, scenario)
        pool.let_go()
        assert pool.hear(scenario.victim) == "reached"
        fell = time.monotonic()
        pool.signal(scenario.victim, signal.SIGSTOP)
        try:
            check_told(pool, scenario, fell)
        finally:
            pool.signal(scenario.victim, signal.SIGCONT)
            pool.send(scenario.victim, "go on")
        (outcome,) = pool.finish(on=[scenario.victim])
        assert outcome.error is None, outcome.trace
        assert outcome.value is not None and outcome.value.left == [], outcome.value


@pytest.mark.parametrize(("point", "scenario"), short_form("chaos", MEETINGS, keep=4))
def test_a_rank_killed_while_its_node_meets_is_named_on_all_nodes(
    tmp_path: Path, point: str, scenario: Scenario
) -> None:
    config = Config(timeout_s=10 * TIMEOUT_S, interfaces="lo")  # measures, for which ranks wait
    with Ranks(len(scenario.nodes)) as pool:
        pool.start(meet_until_told, str(tmp_path), point, scenario, config, 1000)
        pool.let_go()
        assert pool.hear(scenario.victim) == "reached"
        fell = time.monotonic()
        pool.signal(scenario.victim, signal.SIGKILL)
        check_told(pool, scenario, fell)
