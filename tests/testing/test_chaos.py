"""Random faults in small jobs: the campaign in its short form, its long form and its judge.

A campaign whose judge lets everything pass would prove nothing: here it is shown jobs that do what
none may do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from campaigns.chaos.case_job import Observed
from campaigns.chaos.cases import FAULTS, LINK_STATES, Case, draw
from campaigns.chaos.layers import LAYERS
from campaigns.chaos.oracle import judge
from campaigns.job import RankSeen
from tiers import short_form

__all__: list[str] = []

KILLED = signal.SIGKILL.value
CASE = Case(7, "comm", (0, 0), "kill", 1, "work", 0.1, 0.0, 0)
LOST: dict[str, Any] = {
    "what": "error",
    "kind": ["PeerLost", "HsgdError"],
    "rank": 1,
    "text": "rank 1 died",
    "at": 10.1,
}


Campaign = Callable[..., tuple[int, dict[str, Any], str]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1600)]


# Ranks that outnumber the cores, and stopped ones, take seconds each.
@pytest.mark.parametrize(("seed", "limit_s"), short_form("chaos", [(1, 75), (2, 1200)], keep=2))
def test_ranks_that_come_to_harm_harm_nobody(campaign: Campaign, seed: int, limit_s: int) -> None:
    words = ["--seed", str(seed), "--faults", "100000", "--limit-s", str(limit_s), "--twice"]
    code, found, output = campaign("chaos", *words)
    assert code == 0, output
    assert any(result["took_place"] for result in found["results"])


@pytest.mark.parametrize(
    ("under", "seed", "limit_s"),
    short_form(
        "chaos",
        [("nodes", 1, 25), ("mpirun", 1, 25), ("nodes", 2, 600), ("mpirun", 2, 600)],
        {0, 1},
    ),
)
def test_ranks_between_nodes_and_over_mpi_harm_nobody(
    campaign: Campaign, under: str, seed: int, limit_s: int, virtual_nodes: None
) -> None:
    """Links are cut and slow, and MPI has the ranks."""
    words = ["--under", under, "--seed", str(seed), "--faults", "100000", "--twice"]
    code, found, output = campaign("chaos", *words, "--limit-s", str(limit_s))
    assert code == 0, output
    assert any(result["took_place"] for result in found["results"])


def test_a_case_can_be_run_again(campaign: Campaign) -> None:
    numbers = [
        number
        for number in range(1000)
        if (case := draw(number, ["comm"], ["kill"])).phase == "work" and case.delay_s < 0.05
    ][:1]
    options = ["--layers", "comm", "--kinds", "kill", "--replay", *map(str, numbers)]
    code, found, output = campaign("chaos", *options)
    assert code == 0, output
    assert [result["case"]["number"] for result in found["results"]] == numbers
    assert found["results"][0]["latency_s"]


def test_the_number_of_a_case_is_all_of_it() -> None:
    assert draw(12345) == draw(12345)
    drawn = [draw(number) for number in range(3000)]
    assert {case.layer for case in drawn} == {
        name for name, layer in LAYERS.items() if not layer.is_peer and layer.launch is None
    }
    assert {case.fault for case in drawn} == FAULTS.keys() - LINK_STATES.keys()
    drawn = [draw(number, under="nodes") for number in range(3000)]
    assert all(len(set(case.nodes)) > 1 for case in drawn)
    assert {case.fault for case in drawn} == FAULTS.keys()
    drawn = [draw(number, under="mpirun") for number in range(1000)]
    assert {case.layer for case in drawn} == {
        name for name, layer in LAYERS.items() if not layer.is_peer and layer.launch is not None
    }
    assert "setup" not in {case.phase for case in drawn if case.layer == "interposer"}
    assert {case.fault for case in drawn} == FAULTS.keys()
    assert all(len(set(case.nodes)) > 1 for case in drawn if case.fault in LINK_STATES)
    drawn = [draw(number, faults=["cut"], under="mpirun") for number in range(100)]
    assert {case.fault for case in drawn} == {"cut"}
    with pytest.raises(ValueError, match="not started by mpirun"):
        draw(1, ["comm"], under="mpirun")
    with pytest.raises(ValueError, match="cut: no such fault for interposer-nodes under mpirun"):
        draw(1, ["interposer-nodes"], ["cut"], under="mpirun")


def told(**error: Any) -> dict[str, dict[str, Any]]:
    return {"ready": {"at": 1.0}, "error": {**LOST, **error}}


def seen(first: RankSeen, case: Case = CASE, **more: Any) -> list[str]:
    victim = RankSeen(11, {"ready": {"at": 1.0}}, KILLED, ended_at=11.0, steps=3)
    kinds = judge(Observed(case, [first, victim], fault_at=10.0, **more)).problems
    return [kind for kind, _ in kinds]


def rank_0(*, status: int = 256, steps: int = 4, **error: Any) -> RankSeen:
    return RankSeen(10, told(**error), status, ended_at=10.2, steps=steps)


def test_the_judge_knows_what_may_not_be() -> None:
    done = RankSeen(10, {"ready": {"at": 1.0}, "done": {"at": 11.0}}, 0, ended_at=11.0, steps=9)
    assert seen(rank_0()) == []
    assert seen(rank_0(rank=0)) == ["wrong blame"]
    assert seen(rank_0(kind=["ValueError"])) == ["wrong error"]
    assert seen(replace(rank_0(), overdue=True)) == ["hang"]
    assert seen(replace(rank_0(status=KILLED), overdue=True)) == ["hang"]
    assert seen(rank_0(status=signal.SIGSEGV.value)) == ["crash"]
    assert seen(done) == ["no error"]
    assert seen(replace(done, steps=4)) == []  # it needed no more of the victim
    wrong = {"ready": {"at": 1.0}, "wrong": {"text": "5, not 6"}}
    assert seen(replace(done, told=wrong, status=256)) == ["wrong result"]
    assert seen(rank_0(), replace(CASE, fault="pause")) == ["wrong error", "crash"]
    assert seen(rank_0(), left=["process 12"]) == ["leak"]


def test_the_judge_lets_ranks_go_on_that_need_nobody() -> None:
    done = RankSeen(10, {"ready": {"at": 1.0}, "done": {"at": 11.0}}, 0, ended_at=11.0, steps=9)
    assert seen(done, replace(CASE, layer="gossip")) == []


def test_somebody_names_the_victim_where_not_all_can() -> None:
    case = replace(CASE, layer="window", nodes=(0, 0, 0), victim=1)
    victim = RankSeen(11, {"ready": {"at": 1.0}}, KILLED, ended_at=11.0, steps=3)
    one, other = rank_0(), rank_0(rank=0)
    assert judge(Observed(case, [one, victim, other], fault_at=10.0)).problems == []
    found = judge(Observed(case, [other, victim, other], fault_at=10.0)).problems
    assert [kind for kind, _ in found] == ["wrong blame"]


def test_ranks_on_either_side_of_a_cut_link_blame_the_other_one() -> None:
    case = replace(CASE, fault="cut", nodes=(0, 0, 1), victim=1, under="nodes")
    mate, victim, far = (
        RankSeen(pid, told(rank=rank), 256, ended_at=11.0, steps=3)
        for pid, rank in ((10, 2), (11, 2), (12, 0))
    )
    assert judge(Observed(case, [mate, victim, far], fault_at=10.0)).problems == []
    own = replace(mate, told=told(rank=1))
    found = judge(Observed(case, [own, victim, far], fault_at=10.0)).problems
    assert [kind for kind, _ in found] == ["wrong blame"]
    nobody = replace(victim, told=told(rank=-1))
    found = judge(Observed(case, [mate, nobody, far], fault_at=10.0)).problems
    assert [kind for kind, _ in found] == ["wrong blame"]
    early = replace(nobody, told={"error": nobody.told["error"]})  # it did not reach the store
    assert judge(Observed(case, [mate, early, far], fault_at=10.0)).problems == []


def test_mpirun_may_end_the_others_where_it_was_not_told_to_let_them_live() -> None:
    ended = RankSeen(10, {"ready": {"at": 1.0}}, signal.SIGTERM.value, ended_at=10.2, steps=3)
    case = replace(CASE, layer="interposer-abort", under="mpirun")
    assert seen(ended, case) == []
    assert seen(ended, replace(case, layer="interposer")) == ["crash"]
    other = told(kind=["TypeError", "builtins.TypeError", "Exception", "builtins.Exception"])
    assert seen(replace(ended, told=other, status=256), case) == ["wrong error"]
    assert seen(ended, replace(case, fault="pause")) == ["crash", "crash"]
    assert seen(ended, replace(case, fault="slow")) == ["crash", "crash"]


def test_mpirun_may_end_the_others_when_one_that_was_told_has_ended() -> None:
    case = replace(CASE, layer="interposer-nodes", nodes=(0, 0, 1), victim=0, under="mpirun")
    victim = RankSeen(11, {"ready": {"at": 1.0}}, KILLED, ended_at=10.1, steps=3)
    mate = RankSeen(10, told(kind=["mpi4py.MPI.Exception"]), 256, ended_at=10.2, steps=4)
    far = RankSeen(12, {"ready": {"at": 1.0}}, signal.SIGTERM.value, ended_at=10.3, steps=3)
    for other, kinds in (
        (mate, []),
        (replace(mate, ended_at=2.0), ["crash"]),  # too long ago to be why
        (replace(mate, ended_at=11.3), ["crash"]),  # ended later, so was not why
        (replace(mate, status=0), ["crash"]),
    ):
        found = judge(Observed(case, [victim, other, far], fault_at=10.0)).problems
        assert [kind for kind, _ in found] == kinds
    cut = replace(case, layer="mpi", fault="cut")
    beyond = replace(mate, told=told(rank=2))
    ended = replace(far, ended_at=10.4)  # the victim's mate, too, is told
    for ranks in ([beyond, beyond, far], [ended, beyond, far]):
        assert judge(Observed(cut, ranks, fault_at=10.0)).problems == []


def test_a_hang_is_found_and_ended(campaign: Campaign) -> None:
    """A victim that holds the lock of its interpreter never ends by itself."""
    code, found, output = campaign(
        "chaos", "--layers", "comm", "--kinds", "gil", "--faults", "2", "--seed", "4"
    )
    assert code == 0, output
    assert any(result["took_place"] for result in found["results"])
