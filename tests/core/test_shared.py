"""Comm.shared: one array per node that all its ranks see."""

from __future__ import annotations

import ctypes
import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsgd import Comm, SignatureMismatch
from hsgd.errors import SharedMemoryError
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

MOST_RANKS = 4
PR_SET_THP_DISABLE = 41


def shares(count: int, size: int) -> list[slice]:
    bounds = [count * rank // size for rank in range(size + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def do_write_and_read(seat: Seat, path: str, size: int, count: int, dtype: Any) -> list[Any]:
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        shared = comm.shared(count, dtype)
        assert not shared.any()
        comm.barrier()
        shared[shares(count, size)[seat.rank]] = seat.rank + 1
        comm.barrier()
        return [int(value) for value in shared]


@pytest.mark.parametrize("count", [0, 1, 5, 4096, 20_011])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_reads_what_each_wrote(ranks: Ranks, size: int, count: int) -> None:
    for dtype in ("int32", torch.float64):
        found = ranks.run(do_write_and_read, meeting_point(), size, count, dtype, on=range(size))
        expected = [0] * count
        for rank, part in enumerate(shares(count, size)):
            expected[part] = [rank + 1] * len(expected[part])
        assert found == [expected] * size


def do_fill_large(seat: Seat, path: str, size: int, nbytes: int) -> list[bool]:
    """With huge pages, where the kernel has some, and without."""
    seen = []
    for disabled in (0, 1):
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, disabled, 0, 0, 0)
        with Comm.local(path, seat.rank, size, PATIENT) as comm:
            shared = comm.shared(nbytes, "uint8")
            seen.append(not shared.any())
            comm.barrier()
            parts = shares(nbytes, size)
            shared[parts[seat.rank]] = seat.rank + 1
            comm.barrier()
            seen += [bool((shared[part] == rank + 1).all()) for rank, part in enumerate(parts)]
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)
    return seen


@pytest.mark.parametrize("size", [1, 3])
def test_large_arrays_are_whole_on_huge_pages_and_on_small_ones(ranks: Ranks, size: int) -> None:
    nbytes = (49 << 20) + 12_345
    found = ranks.run(do_fill_large, meeting_point(), size, nbytes, on=range(size))
    assert found == [[True] * (2 + 2 * size)] * size


def do_use_in_a_collective(seat: Seat, path: str) -> list[Any]:
    with Comm.local(path, seat.rank, 3, PATIENT) as comm:
        shared = comm.shared((3, 1000), "float32")
        shared[seat.rank] = 10.0**seat.rank
        comm.barrier()
        return [float(x) for x in comm.allreduce(shared[(seat.rank + 1) % 3])[:2]]


def test_a_collective_takes_it_for_an_array_like_others(ranks: Ranks) -> None:
    found = ranks.run(do_use_in_a_collective, meeting_point(), on=range(3))
    assert found == [[111.0, 111.0]] * 3


def mapped_bytes() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:hsgd" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def do_keep_and_drop(seat: Seat, path: str, size: int, nbytes: int) -> tuple[bool, int]:
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        shared = comm.shared(nbytes, "uint8")
        view = shared[nbytes - 3 :]
        del shared
        view[seat.rank] = 7
        comm.barrier()
    seen = view.tolist() == [7] * size
    del view
    gc.collect()
    return seen, mapped_bytes()


def test_the_memory_lives_until_its_last_view_is_gone_also_after_close(ranks: Ranks) -> None:
    found = ranks.run(do_keep_and_drop, meeting_point(), 3, 1 << 20, on=range(3))
    assert found == [(True, 0)] * 3


def do_differ(seat: Seat, path: str) -> None:
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        if seat.rank == 0:
            comm.shared(10)
        else:
            comm.empty(10)


def test_a_rank_that_asks_for_another_kind_of_array_is_told(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(do_differ, meeting_point(), on=range(2)):
        assert isinstance(outcome.error, SignatureMismatch), outcome.trace


def do_ask_for_too_much(seat: Seat, path: str) -> list[float]:
    with Comm.local(path, seat.rank, 2, PATIENT) as comm:
        with pytest.raises(SharedMemoryError, match="bytes are needed"):
            comm.shared(1 << 50, "uint8")
        return comm.allreduce(np.ones(2)).tolist()  # type: ignore[no-any-return]


def test_memory_that_is_not_there_is_refused_and_the_communicator_goes_on(ranks: Ranks) -> None:
    assert ranks.run(do_ask_for_too_much, meeting_point(), on=range(2)) == [[2.0, 2.0]] * 2


def test_wrong_shapes_and_dtypes_are_refused_at_once() -> None:
    with Comm.local(meeting_point(), 0, 1) as comm:
        with pytest.raises(ValueError, match=r"^shared: shape is -1; give extents of 0 or more"):
            comm.shared(-1)
        with pytest.raises(TypeError, match=r"^shared: dtype complex64 is not supported"):
            comm.shared(3, "complex64")
