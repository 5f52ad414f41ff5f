"""Who gets which rank in a new world, and when a job cannot go on."""

from __future__ import annotations

from hsgd.jobs.elastic.world_order import (
    Candidate,
    NodeRow,
    arrange,
    least_ranks,
    lost_state,
    row_from,
    row_to,
    staying,
)

__all__: list[str] = []


def row(
    *candidates: Candidate,
    begun: bool = False,
    held: bool = False,
    patient: bool = False,
    leaving: bool = False,
) -> NodeRow:
    return NodeRow("node", begun, held, patient, leaving, candidates)


def ranks(rows: list[NodeRow], most: int = 100) -> list[dict[int, int]]:
    return [{slot: seat.rank for slot, seat in own.items()} for own in arrange(rows, most)]


def new(slot: int) -> Candidate:
    return Candidate(slot, held=0, rank=-1)


def test_a_first_world_numbers_ranks_node_by_node() -> None:
    seats = arrange([row(new(0), new(1)), row(new(0))], 100)
    assert [
        [(s.rank, s.local_rank, s.local_size, s.node_rank) for s in own.values()] for own in seats
    ] == [
        [(0, 0, 2, 0), (1, 1, 2, 0)],
        [(2, 0, 1, 1)],
    ]


def test_rank_0_is_one_that_has_the_state_also_where_new_ranks_come_first() -> None:
    late = Candidate(1, held=3, rank=2)
    assert ranks([row(new(0)), row(new(0), late)]) == [{0: 2}, {1: 0, 0: 1}]
    # one that was in a world, but died out of it before it got the state, comes after those with it
    stale = Candidate(0, held=2, rank=0)
    assert ranks([row(stale), row(late)]) == [{0: 1}, {1: 0}]


def test_survivors_keep_their_order() -> None:
    old = [Candidate(slot, held=4, rank=rank) for slot, rank in ((0, 5), (1, 1), (2, 3))]
    assert ranks([row(*old)]) == [{1: 0, 2: 1, 0: 2}]


def test_beyond_the_most_ranks_new_ones_wait() -> None:
    old = Candidate(1, held=1, rank=0)
    assert ranks([row(new(0), old), row(new(0))], most=2) == [{1: 0, 0: 1}, {}]
    assert ranks([row(new(0)), row(old)], most=1) == [{}, {1: 0}]


def test_nodes_without_ranks_take_no_number() -> None:
    seats = arrange([row(), row(new(0))], 100)
    assert seats[0] == {}
    assert seats[1][0].node_rank == 0


def test_a_job_ends_where_nobody_is_left_who_had_the_state() -> None:
    survivor, holder = Candidate(0, held=0, rank=1), Candidate(0, held=2, rank=1)
    assert not lost_state([row(new(0))])  # the first world
    assert not lost_state([row(survivor, begun=True)])  # nobody had more than that
    assert lost_state([row(new(0), begun=True)])
    assert lost_state([row(begun=True)])
    assert not lost_state([row(holder, begun=True, held=True)])
    assert lost_state([row(survivor), row(begun=True, held=True)])


def test_ranks_that_are_to_leave_stay_until_others_have_the_state() -> None:
    holder, other = Candidate(0, held=2, rank=0), Candidate(0, held=2, rank=1)
    old = row(holder, begun=True, held=True, leaving=True)
    assert ranks(staying([old, row(new(0), begun=True, held=True)], 1)) == [{0: 0}, {0: 1}]
    two = row(holder, Candidate(1, held=2, rank=1), begun=True, held=True, leaving=True)
    new_two = row(new(0), new(1), begun=True, held=True)
    assert ranks(staying([two, new_two], 1), most=2) == [{0: 0}, {0: 1}]  # one with the state
    assert ranks(staying([old, row(other, begun=True, held=True)], 1)) == [{}, {0: 0}]
    assert ranks(staying([old, row(other, begun=True, held=True)], 2)) == [{0: 0}, {0: 1}]


def test_only_the_first_world_waits_for_all_ranks_and_not_for_ever() -> None:
    assert least_ranks([row(patient=True), row()], 1, 4) == 4
    assert least_ranks([row(), row()], 1, 4) == 1
    assert least_ranks([row(patient=True), row(begun=True)], 2, 4) == 2


def test_rows_travel_as_json() -> None:
    there = row(new(0), Candidate(3, held=2, rank=1), begun=True, held=True, patient=True)
    assert row_from(row_to(there)) == there
