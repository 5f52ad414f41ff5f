"""Comm.request_stop: all ranks learn of it with the same collective, of every kind and size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsgd import Comm
from hsgd.errors import SignatureMismatch
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 4
LAYOUTS = {
    "1": [0],
    "4": [0, 0, 0, 0],
    "2+2": [0, 0, 1, 1],
    "2+1+1": [0, 0, 1, 2],
    "in turns": [0, 1, 0, 1],
}
LARGE = 300_001
KINDS: dict[str, Callable[[Comm], object]] = {
    "barrier": lambda comm: comm.barrier(),
    "small": lambda comm: comm.allreduce(np.ones(3, np.float32)),
    "large": lambda comm: comm.allreduce(np.ones(LARGE, np.float32)),
    "empty": lambda comm: comm.allreduce(np.ones(0)),
    "small broadcast": lambda comm: comm.broadcast(np.ones(3), comm.size - 1),
    "large broadcast": lambda comm: comm.broadcast(np.ones(LARGE), comm.size - 1),
    "small gather": lambda comm: comm.allgather(np.ones(1)),
    "ragged gather": lambda comm: comm.allgather(np.ones(comm.rank * 1000)),
    "scatter": lambda comm: comm.reduce_scatter(np.ones((LARGE, 2), np.float32)),
    "small exchange": lambda comm: comm.alltoall(np.ones((comm.size, 2))),
    "large exchange": lambda comm: comm.alltoall(np.ones((comm.size, 50_000))),
    "asynchronous": lambda comm: comm.allreduce_async(np.ones(LARGE, np.float32)),
}
CALLS = 4


def do_request(
    seat: Seat, folder: str, nodes: list[int], flat_ranks: int
) -> dict[str, list[int | None]]:
    """By kind, and by the rank that asks before its third call: after which call each knows."""
    found: dict[str, list[int | None]] = {}
    config = dataclasses.replace(PATIENT, flat_ranks=flat_ranks)
    with meet(seat, folder, nodes, config) as whole:
        for kind, call in KINDS.items():
            for asking in {0, len(nodes) - 1}:
                with whole.split(0) as comm:  # type: ignore[union-attr]
                    known = None
                    for number in range(CALLS):
                        if number == 2 and comm.rank == asking:
                            comm.request_stop()
                        call(comm)
                        if known is None and comm.stop_requested():
                            known = number
                    found.setdefault(kind, []).append(known)
    return found


@pytest.mark.parametrize("flat_ranks", [16, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_know_after_the_same_collective(
    ranks: Ranks, tmp_path: Path, layout: str, flat_ranks: int
) -> None:
    nodes = LAYOUTS[layout]
    for found in ranks.run(do_request, str(tmp_path), nodes, flat_ranks, on=range(len(nodes))):
        for kind, known in found.items():
            assert known == [2] * len(known), kind


def do_differ(seat: Seat, folder: str, nodes: list[int]) -> list[int]:
    """Mismatches one after the other, so that a rank may be one collective ahead of others."""
    found = []
    with meet(seat, folder, nodes, dataclasses.replace(PATIENT, flat_ranks=2)) as comm:
        for number in range(200):
            try:
                comm.allreduce(np.ones(1 + (number % 3 > 0 and comm.rank == 3)))
            except SignatureMismatch:
                found.append(number)
    return found


@pytest.mark.parametrize("layout", ["4", "2+2"])
def test_mismatches_in_a_row_are_told_to_all(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    for found in ranks.run(do_differ, str(tmp_path), LAYOUTS[layout]):
        assert found == [number for number in range(200) if number % 3]
