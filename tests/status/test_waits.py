"""The judgement of `hsgd status`, on notes that no job wrote: who is blamed, and who is not."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest

from hsgd.tools.status import looking
from hsgd.tools.status.page import Note, NoteState
from hsgd.tools.status.waits import Group, Standing, groups_of

__all__: list[str] = []


def note_of_a_waiting_rank(rank: int, **fields: Any) -> Note:
    """Of four ranks on one node; it looked at the others 20 ms before it was read."""
    read_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    known: dict[str, Any] = {
        **{field.name: 0 for field in dataclasses.fields(Note)},
        "sequence": 5,
        "in_call": True,
        "state": NoteState.OPEN,
        "id": 77,
        "size": 4,
        "awaited": -1,
        "awaited_node": -1,
        "error_rank": -1,
        "nodes": 1,
        "local_size": 4,
        "name": "",
        "message": "",
        "is_torn": False,
        "rank": rank,
        "local_rank": rank,
        "since_ns": read_ns - 10**9,
        "looked_ns": read_ns - 20_000_000,
        "read_ns": read_ns,
    }
    return Note(**{**known, "waits_since_ns": known["since_ns"], **fields})


def seen(monkeypatch: pytest.MonkeyPatch, notes: list[Note]) -> Group:
    """What is thought of the notes of this process."""
    monkeypatch.setattr(looking, "_own_processes", lambda: [os.getpid()])
    monkeypatch.setattr(looking, "notes_of", lambda _: notes)
    (group,) = groups_of(looking.look().rows)
    return group


def test_ages_are_those_of_the_moment_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the others of a large node takes seconds."""
    past_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 3 * 10**9
    times = {"read_ns": past_ns, "looked_ns": past_ns - 20_000_000, "since_ns": past_ns - 10**9}
    group = seen(monkeypatch, [note_of_a_waiting_rank(rank, **times) for rank in range(3)])
    assert group.standings == [Standing.WAITS] * 3


@pytest.mark.parametrize("awaited", [-1, 3])
def test_a_rank_that_was_not_seen_is_blamed_only_when_another_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, awaited: int
) -> None:
    group = seen(monkeypatch, [note_of_a_waiting_rank(rank, awaited=awaited) for rank in range(3)])
    assert group.held_up_by == ([3] if awaited == 3 else [])
    assert group.is_held_up and "rank 3 of" in group.findings[0]


def test_a_node_that_was_not_asked_and_is_waited_for_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = [note_of_a_waiting_rank(rank, nodes=2, size=8, awaited_node=1) for rank in range(4)]
    group = seen(monkeypatch, notes)
    assert group.held_up_by_nodes == [1]
    assert group.is_held_up and "node 1 is waited for" in group.findings[0]
