"""Asynchronous reduce_scatter, allgather and alltoall give what the blocking ones give."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from block_programs import wrong_results
from hsgd import Comm, HsgdError
from hsgd.config import Config
from ranks import PATIENT, Ranks, Seat, meeting_point
from reference import DTYPES

__all__: list[str] = []

MOST_RANKS = 4
LARGE = 3_000_000  # elements: dozens of pipeline steps
CONFIGS = {
    "default": PATIENT,
    "tiny chunks": Config(timeout_s=30, oneshot_bytes=0, chunk_bytes=4096, slots=3),
    "no spin": Config(timeout_s=30, oneshot_bytes=100, chunk_bytes=5000, slots=5, spin=0),
}


@pytest.fixture(scope="module")
def paths() -> dict[tuple[int, str], str]:
    """Where the communicators of each size and configuration meet; made at first use, then kept."""
    return {(size, name): meeting_point() for size in range(1, MOST_RANKS + 1) for name in CONFIGS}


def do_blocks(seat: Seat, path: str, size: int, name: str, seed: int) -> list[str]:
    comm = seat.comm(path, size, CONFIGS[name])
    return wrong_results(comm, [list(range(size))], seed, 50, DTYPES, asynchronous=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_schedules_of_calls_whose_ranks_have_different_parts_equal_numpy(
    ranks: Ranks, paths: dict[tuple[int, str], str], size: int, name: str
) -> None:
    for seed in range(2):
        args = (paths[size, name], size, name, seed)
        assert ranks.run(do_blocks, *args, on=range(size)) == [[]] * size


def do_joined_kinds(seat: Seat, path: str) -> list[Any]:
    comm = seat.comm(path, 2)
    rank = seat.rank
    bf16 = torch.full((rank + 1, 2), float(rank), dtype=torch.bfloat16, requires_grad=True)
    given = np.zeros((3, 2))
    handles: list[Any] = [
        comm.allgather_async(bf16),
        comm.allgather_async(np.full((2 - rank, 2), rank), out=given.view(int), name="given"),
        comm.allgather_async(bytearray([rank, 7])),
        comm.allgather_async(np.zeros((rank, 0, 3))),
        comm.alltoall_async(np.arange(2) + 10 * rank),
        comm.alltoall_async(torch.arange(3.0), send_counts=[1, 2]),
        comm.reduce_scatter_async(np.ones(3), "mean", counts=[1, 2]),
        comm.reduce_scatter_async(given, out=given[:2] if rank == 0 else given[2:]),
    ]
    joined, same, text, empty, even, (mixed, received), own, in_place = (
        handle.wait() for handle in handles
    )
    assert joined.dtype is torch.bfloat16 and not joined.requires_grad
    assert same.base is given and in_place.base is given and handles[0].wait() is joined
    assert repr(handles[1]) == '<hsgd.Handle of allgather "given", done>'
    comm.close()
    joined += 1  # the memory is the result's own
    return [
        joined.tolist(),
        bytes(text),
        empty.shape,
        even.tolist(),
        (mixed.tolist(), received),
        own.tolist(),
    ]


def test_results_whose_size_shows_late_are_arrays_of_the_kind_that_was_given(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(do_joined_kinds, meeting_point(), on=range(2))):
        assert result == [
            [[1.0] * 2] + [[2.0] * 2] * 2,
            b"\x00\x07\x01\x07",
            (1, 0, 3),
            [rank, 10 + rank],
            ([0.0, 0.0] if rank == 0 else [1.0, 2.0, 1.0, 2.0], [1, 1] if rank == 0 else [2, 2]),
            [1.0] * (rank + 1),
        ]


def do_wrong_out(seat: Seat, path: str, wrong: str) -> list[Any]:
    """Only rank 1's `out` is wrong, which shows when the rows are known."""
    comm = seat.comm(path, 2)
    array = np.ones(4)
    out = {"rows": np.ones(7), "overlap": array[:4]}[wrong] if seat.rank == 1 else None
    handles: list[Any] = [
        comm.allgather_async(array[:2], out=out),
        comm.alltoall_async(array, send_counts=[2, 2], out=out),
    ]
    if seat.rank == 0:
        return [handles[0].wait().tolist(), handles[1].wait()[0].tolist()]
    lines = []
    for handle in handles:
        for _ in range(2):
            with pytest.raises(ValueError, match="out") as caught:
                handle.wait()
        assert not isinstance(caught.value, HsgdError) and handle.done()
        lines.append(str(caught.value))
    return lines


@pytest.mark.parametrize("wrong", ["rows", "overlap"])
def test_an_out_that_does_not_fit_is_refused_by_wait_and_disturbs_nobody(
    ranks: Ranks, wrong: str
) -> None:
    right, lines = ranks.run(do_wrong_out, meeting_point(), wrong, on=range(2))
    assert right == [[1.0] * 4] * 2
    expected = "out has 7 rows, but the result has 4" if wrong == "rows" else "output overlap"
    assert all(expected in line and "\n" not in line for line in lines)


def do_drop_rows(seat: Seat, path: str, waits: bool) -> list[Any]:
    """The memory of a result that nobody ever saw, or that outlives its communicator."""
    comm = Comm.local(path, seat.rank, 2, PATIENT)
    if seat.rank == 1:
        seat.pipe.recv()
    handle = comm.allgather_async(np.full(LARGE, float(seat.rank)))
    if not waits:
        del handle
        gc.collect()
    if seat.rank == 0:
        seat.tell("submitted")
    comm.close()
    if not waits:
        return []
    joined = handle.wait()
    del handle
    gc.collect()
    return [len(joined), joined[0], joined[-1]]


@pytest.mark.parametrize("waits", [False, True])
def test_the_memory_of_a_joined_result_lives_as_long_as_it_is_needed(
    ranks: Ranks, waits: bool
) -> None:
    ranks.start(do_drop_rows, meeting_point(), waits, on=range(2))
    ranks.hear(0)
    ranks.send(1, "come")
    results = [outcome.value for outcome in ranks.finish(on=range(2))]
    assert results == [[2 * LARGE, 0.0, 1.0] if waits else []] * 2
