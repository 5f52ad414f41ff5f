"""Comm.empty: arrays that all ranks of a node can reach give the same bits as others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_programs import wrong_results
from hsgd import Comm, SignatureMismatch
from hsgd.comm.communicator import DTYPES, OPS
from hsgd.errors import SharedMemoryError
from ranks import PATIENT, Ranks, Seat, meeting_point
from reference import allreduced, digest, made

__all__: list[str] = []

MOST_RANKS = 4
MOST_ELEMENTS = 300_000


@pytest.fixture(scope="module")
def paths() -> dict[int, str]:
    return {size: meeting_point() for size in range(1, MOST_RANKS + 1)}


def arena(seat: Seat, path: str, size: int) -> list[Any]:
    """Two shared arrays of bytes, made at the first call and kept."""
    key = ("arena", path)
    if key not in seat.kept:
        comm = seat.comm(path, size)
        seat.kept[key] = [comm.empty(MOST_ELEMENTS * 8 + 4096, "uint8") for _ in range(2)]
    return seat.kept[key]  # type: ignore[no-any-return]


def do_allreduce(
    seat: Seat, path: str, size: int, count: int, dtype: str, op: str, style: str
) -> str:
    comm = seat.comm(path, size)
    stored = made(3, seat.rank, count, dtype, special=True)
    parts = []
    for whole in arena(seat, path, size):
        start = 64 * (seat.rank % 3)  # ranks need not use the same place
        parts.append(whole[start : start + stored.nbytes].view(stored.dtype))
    shared, other = parts
    shared[:] = stored
    private = style == "one private" and seat.rank == size - 1
    source = stored if private else shared
    target = source if style == "in place" else np.zeros_like(stored) if private else other
    wrap = _torch_view if dtype == "bfloat16" else lambda array: array
    comm.allreduce(wrap(source), op, out=wrap(target))
    return digest(target)


def _torch_view(stored: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(stored.view("int16")).view(torch.bfloat16)


@pytest.mark.long
@settings(max_examples=200, derandomize=True, database=None)
@given(data=st.data())
def test_shared_arrays_give_the_bits_of_private_ones(
    ranks: Ranks, paths: dict[int, str], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, MOST_RANKS), label="ranks")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    op = data.draw(st.sampled_from(OPS if "float" in dtype else OPS[:1] + OPS[2:]), label="op")
    counts = st.sampled_from([0, 1, 5, 1023, 4097, 32_769, 65_536, 299_999])
    count = data.draw(counts, label="count")
    style = data.draw(st.sampled_from(["in place", "two arrays", "one private"]), label="style")
    results = ranks.run(do_allreduce, paths[size], size, count, dtype, op, style, on=range(size))
    inputs = [made(3, rank, count, dtype, special=True) for rank in range(size)]
    assert results == [digest(allreduced([inputs], dtype, op))] * size


def do_blocks(seat: Seat, path: str, size: int, seed: int) -> list[str]:
    comm = seat.comm(path, size)
    nodes = [list(range(size))]
    shared = arena(seat, path, size)
    return wrong_results(comm, nodes, seed, 60, DTYPES, 60_000 // size, shared=shared)


@pytest.mark.parametrize("size", range(1, MOST_RANKS + 1))
def test_collectives_of_blocks_give_from_shared_arrays_what_numpy_gives(
    ranks: Ranks, paths: dict[int, str], size: int
) -> None:
    for seed in range(3):
        assert ranks.run(do_blocks, paths[size], size, seed, on=range(size)) == [[]] * size


def do_broadcasts(seat: Seat, path: str, size: int) -> list[str]:
    comm = seat.comm(path, size)
    whole, _ = arena(seat, path, size)
    wrong = []
    for turn, count in enumerate([9_000, 65_537, 300_001, 2_000_003]):
        for private in (None, 0, size - 1):
            root = (turn + (private or 0)) % size
            stored = made(turn, seat.rank, count, "uint8")
            data = stored if seat.rank == private else whole[seat.rank :][:count]
            data[:] = stored
            comm.broadcast(data, root=root)
            if digest(data) != digest(made(turn, root, count, "uint8")):
                wrong.append(f"{count} from {root}, {private} private")
            data[:] = 255  # nobody reads it any more
            comm.barrier()
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_broadcast_of_shared_arrays_gives_all_the_bits_of_the_root(
    ranks: Ranks, paths: dict[int, str], size: int
) -> None:
    assert ranks.run(do_broadcasts, paths[size], size, on=range(size)) == [[]] * size


def do_overwrite_at_once(seat: Seat, path: str) -> list[bool]:
    """Inputs belong to their rank again when the call has returned."""
    comm = seat.comm(path, 3)
    shared, other = comm.empty(9 << 17), comm.empty(9 << 17)
    calls: dict[str, Callable[[int], np.ndarray]] = {
        "allgather": lambda root: comm.allgather(shared[: 3 << 17]),
        "reduce_scatter": lambda root: comm.reduce_scatter(shared, "max"),
        "allreduce": lambda root: comm.allreduce(shared, "max", out=other),
        "staged allreduce": lambda root: comm.allreduce(shared, "max"),
        "alltoall": lambda root: comm.alltoall(shared),
        "broadcast": lambda root: comm.broadcast(shared, root=root).copy(),
    }
    right = []
    for turn in range(8):
        root = turn % 3
        rows = {kind: [2] * 3 for kind in calls if "reduce" in kind} | {"broadcast": [root] * 3}
        for kind, call in calls.items():
            shared[:] = 100 * turn + seat.rank
            result = call(root).reshape(3, -1)
            shared[:] = -1.0
            expected = 100 * turn + np.array([rows.get(kind, range(3))]).T
            right.append(bool((result == expected).all()))
    return right


def test_an_input_may_be_overwritten_when_the_call_has_returned(ranks: Ranks) -> None:
    assert ranks.run(do_overwrite_at_once, meeting_point(), on=range(3)) == [[True] * 48] * 3


def do_move_no_more_than_needed(seat: Seat, path: str) -> tuple[int, int]:
    comm = Comm.local(path, seat.rank, 2, PATIENT)
    shared = comm.empty(1 << 20)
    moved = []
    for array in (shared, np.zeros(1 << 20, np.float32)):
        before = comm.metrics().intra_bytes
        comm.allreduce(array, out=array)
        moved.append(comm.metrics().intra_bytes - before)
    comm.close()
    return moved[0], moved[1]


def test_shared_arrays_move_2_bytes_per_byte(ranks: Ranks) -> None:
    for shared, private in ranks.run(do_move_no_more_than_needed, meeting_point(), on=range(2)):
        assert shared == 2 * (4 << 20)
        assert private == 2 * (4 << 20)  # of shared memory alone; private memory comes on top


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hsgd")


def do_give_back(seat: Seat, path: str) -> list[int]:
    start = mapped_segments()
    comm = Comm.local(path, seat.rank, 3, PATIENT)
    with_comm = mapped_segments()
    array = comm.empty((1000, 3), np.int32)
    tensor = comm.empty([5], torch.float64)
    assert array.shape == (1000, 3) and array.dtype == np.int32 and not array.any()
    assert tensor.shape == (5,) and tensor.dtype == torch.float64 and not tensor.any()
    counts = [mapped_segments() - with_comm]
    part = array[10:, 1]
    del array
    gc.collect()
    comm.close()
    part[:] = 7  # a view keeps the memory, also after close()
    counts.append(mapped_segments() - start)
    del part, tensor
    gc.collect()
    counts.append(mapped_segments() - start)
    return counts


def test_memory_lives_as_long_as_its_last_view(ranks: Ranks) -> None:
    assert ranks.run(do_give_back, meeting_point(), on=range(3)) == [[2, 2, 0]] * 3


def do_ask_wrongly(seat: Seat, path: str) -> list[str]:
    comm = Comm.local(path, seat.rank, 3, PATIENT)
    reports = []
    for shape, dtype in ((10 + seat.rank // 2, "int8"), (1 << 44, "float64")):
        with pytest.raises((SignatureMismatch, SharedMemoryError)) as error:
            comm.empty(shape, dtype)
        reports.append(str(error.value))
    for wrong in ("complex64", "int16", "bfloat16", torch.int16):
        with pytest.raises(TypeError):
            comm.empty(3, wrong)
    with pytest.raises(ValueError, match="extents of 0 or more"):
        comm.empty((3, -1))
    assert comm.empty((0, 4)).shape == (0, 4)
    assert comm.allreduce(comm.empty(3)).tolist() == [0, 0, 0]  # still good
    comm.close()
    return reports


def test_wrong_requests_are_refused_alike(ranks: Ranks) -> None:
    for mismatch, memory in ranks.run(do_ask_wrongly, meeting_point(), on=range(3)):
        assert "empty #1: rank 0 asked for 10 int8, rank 2 asked for 11 int8" in mismatch
        assert "3 x 140737488355328 bytes are needed and " in memory
        assert "ask for less, or raise the memory limit" in memory
