"""reduce_scatter, allgather and alltoall: each rank gets its rows, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from block_programs import wrong_results
from hsgd import Comm, HsgdError, SignatureMismatch
from hsgd.config import Config
from ranks import Ranks, Seat, meeting_point
from reference import DTYPES, as_torch, digest, made
from wrong_calls import refused_alone

__all__: list[str] = []

MOST_RANKS = 4
CONFIGS = {
    "default": Config(timeout_s=30),
    "in groups": Config(timeout_s=30, flat_ranks=1),
    "tiny chunks in groups": Config(
        timeout_s=30, oneshot_bytes=64, chunk_bytes=4096, slots=6, flat_ranks=1
    ),
    "tiny chunks": Config(timeout_s=30, oneshot_bytes=0, chunk_bytes=4096, slots=3),
    "odd chunks": Config(
        timeout_s=30, oneshot_bytes=100, chunk_bytes=5000, slots=5, store="nontemporal"
    ),
    "wide one-shot": Config(timeout_s=30, oneshot_bytes=1 << 17, store="ordinary", spin=0),
}


@pytest.fixture(scope="module")
def paths() -> dict[tuple[int, str], str]:
    """Where the communicators of each size and configuration meet; made at first use, then kept."""
    return {(size, name): meeting_point() for size in range(1, MOST_RANKS + 1) for name in CONFIGS}


def do_program(seat: Seat, path: str, size: int, config: Config, seed: int) -> list[str]:
    comm = seat.comm(path, size, config)
    return wrong_results(comm, [list(range(size))], seed, 60, DTYPES)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_random_programs_give_what_numpy_gives(
    ranks: Ranks, paths: dict[tuple[int, str], str], size: int, name: str
) -> None:
    for seed in range(4):
        args = (paths[size, name], size, CONFIGS[name], seed)
        assert ranks.run(do_program, *args, on=range(size)) == [[]] * size


def do_large(seat: Seat, path: str, rows: int) -> list[bool]:
    """Some megabytes: many steps of the settings that users have."""
    comm = seat.comm(path, 3)
    block = np.full((rows + seat.rank, 4), seat.rank, "float32")
    gathered = comm.allgather(block)
    own = comm.reduce_scatter(np.ones((3 * rows + 1, 4), "float32"))
    mixed, received = comm.alltoall(
        np.full(3 * rows + 5, seat.rank), send_counts=[rows, rows + 5, rows]
    )
    return [
        bool((gathered == np.repeat(range(3), [rows, rows + 1, rows + 2])[:, None]).all()),
        own.shape == (rows + (seat.rank == 0), 4) and bool((own == 3).all()),
        received == [rows + 5 * (seat.rank == 1)] * 3,
        bool((mixed == np.repeat(range(3), received)).all()),
    ]


def test_megabytes_arrive_whole(ranks: Ranks) -> None:
    assert ranks.run(do_large, meeting_point(), 300_007, on=range(3)) == [[True] * 4] * 3


def sent_around(limit: int, size: int, rank: int, many: list[int]) -> list[int]:
    """Bytes for each rank: much for itself, and for the others `limit` in all if it sends many."""
    counts = [(limit if rank in many else 7 * size) // (size - 1)] * size
    counts[rank - 1] += (limit if rank in many else 7 * size) % (size - 1)
    counts[rank] = 100_000
    return counts


def do_exchange_around_limits(seat: Seat, path: str, size: int) -> list[tuple[int, list[int]]]:
    """Return what went wrong around the sizes up to which blocks lie beside the header."""
    comm = seat.comm(path, size)
    wrong = []
    for most in (4096, 16384):
        for limit in range(most - 4 * (size + 1) - 1, most - 4 * (size + 1) + 2):
            for many in ([0], list(range(size))):
                counts = sent_around(limit, size, seat.rank, many)
                blocks = [made(to, seat.rank, count, "uint8") for to, count in enumerate(counts)]
                found, received = comm.alltoall(np.concatenate(blocks), send_counts=counts)
                wanted = [sent_around(limit, size, rank, many)[seat.rank] for rank in range(size)]
                parts = [made(seat.rank, rank, count, "uint8") for rank, count in enumerate(wanted)]
                if received != wanted or not np.array_equal(found, np.concatenate(parts)):
                    wrong.append((limit, many))
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_around_the_limits_of_the_small_form_arrive(ranks: Ranks, size: int) -> None:
    path = meeting_point()
    assert ranks.run(do_exchange_around_limits, path, size, on=range(size)) == [[]] * size


def do_same_as_allreduce(seat: Seat, path: str, dtype: str, op: str, count: int) -> list[bool]:
    comm = seat.comm(path, 3, CONFIGS["tiny chunks"])
    array = as_torch(made(1, seat.rank, count, dtype, special=True), dtype)
    whole = comm.allreduce(array, op)
    parts = {}
    for counts in (None, [count, 0, 0], [1, 2, count - 3], [0, count - 1, 1]):
        rows = counts or [count // 3 + (rank < count % 3) for rank in range(3)]
        begin = sum(rows[: seat.rank])
        own = comm.reduce_scatter(array, op, counts=counts)
        parts[str(counts)] = (own, whole[begin : begin + rows[seat.rank]])
    bits = torch.uint8
    return [
        digest(own.view(bits).numpy()) == digest(part.view(bits).numpy())
        for own, part in parts.values()
    ]


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_rows_of_a_reduce_scatter_are_those_of_an_allreduce(
    ranks: Ranks, paths: dict[tuple[int, str], str], dtype: str, op: str
) -> None:
    args = (paths[3, "tiny chunks"], dtype, op)
    for count in (7, 5000, 40_003):
        assert ranks.run(do_same_as_allreduce, *args, count, on=range(3)) == [[True] * 4] * 3


def do_shapes(seat: Seat, path: str) -> list[Any]:
    comm = seat.comm(path, 2)
    rank = seat.rank
    grad = torch.ones(4, 2, requires_grad=True)
    own = comm.reduce_scatter(grad)
    mixed, received = comm.alltoall(torch.arange(3.0), send_counts=torch.tensor([1, 2]))
    return [
        (own.requires_grad, tuple(own.shape)),
        comm.allgather(np.float64(rank)).tolist(),
        comm.allgather(torch.tensor(rank)).tolist(),
        comm.allgather(np.zeros((rank, 0, 3))).shape,
        comm.allgather(np.zeros((2 * rank, 3))).shape,
        comm.reduce_scatter(np.zeros((0, 5))).shape,
        comm.reduce_scatter(np.ones(1)).tolist(),
        comm.alltoall(np.zeros((0, 2))).shape,
        (mixed.tolist(), received),
        bytes(comm.allgather(bytearray([rank, 7]))),
        comm.alltoall(memoryview(np.arange(2) + 10 * rank), out=np.zeros(2, int)).tolist(),
        comm.reduce_scatter(np.ones(3), counts=np.array([1, 2])).tolist(),
    ]


def test_arrays_of_every_shape_and_kind_are_taken(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(do_shapes, meeting_point(), on=range(2))):
        assert result == [
            (False, (2, 2)),
            [0.0, 1.0],
            [0, 1],
            (1, 0, 3),
            (2, 3),
            (0, 5),
            [2.0] * (rank == 0),
            (0, 2),
            ([0.0, 0.0] if rank == 0 else [1.0, 2.0, 1.0, 2.0], [1, 1] if rank == 0 else [2, 2]),
            b"\x00\x07\x01\x07",
            [rank, 10 + rank],
            [2.0] * (rank + 1),
        ]


# --- errors ---


def _overlapping(comm: Comm) -> Any:
    array = np.ones(10)
    return comm.reduce_scatter(array[:8], out=array[2:6], counts=[4, 4])


WRONG: dict[str, tuple[Callable[[Comm], Any], type[Exception], str]] = {
    "strided": (lambda c: c.allgather(np.ones(8)[::2]), ValueError, "not C-contiguous"),
    "complex": (lambda c: c.allgather(np.ones(4, complex)), TypeError, "float32, float64"),
    "a list": (lambda c: c.allgather([1.0]), TypeError, "list is not an array"),
    "a list to scatter": (lambda c: c.reduce_scatter([1.0]), TypeError, "list is not an array"),
    "unknown op": (lambda c: c.reduce_scatter(np.ones(4), "avg"), ValueError, "sum, mean, min"),
    "mean of integers": (
        lambda c: c.reduce_scatter(np.ones(4, int), "mean"),
        ValueError,
        "mean of int64",
    ),
    "no rows to split": (lambda c: c.reduce_scatter(np.float64(1)), ValueError, "0-d array"),
    "no rows to send": (lambda c: c.alltoall(np.float64(1)), ValueError, "0-d array"),
    "too few counts": (
        lambda c: c.reduce_scatter(np.ones(4), counts=[4]),
        ValueError,
        "1 counts for 4 rows, but there are 2 ranks and 4 rows",
    ),
    "counts of other rows": (
        lambda c: c.reduce_scatter(np.ones(4), counts=[1, 2]),
        ValueError,
        "2 counts for 3 rows",
    ),
    "negative counts": (
        lambda c: c.reduce_scatter(np.ones(4), counts=[5, -1]),
        ValueError,
        "counts are [5, -1]",
    ),
    "counts that are no numbers": (
        lambda c: c.alltoall(np.ones(4), send_counts=["a", "b"]),
        TypeError,
        "whole number",
    ),
    "counts to send of other rows": (
        lambda c: c.alltoall(np.ones(4), send_counts=[2, 3]),
        ValueError,
        "2 counts for 5 rows",
    ),
    "rows that do not split": (lambda c: c.alltoall(np.ones(3)), ValueError, "give send_counts"),
    "out with other rows": (
        lambda c: c.reduce_scatter(np.ones(4), out=np.ones(3)),
        ValueError,
        "out has 3 rows, but the result has 2",
    ),
    "out of another dtype": (
        lambda c: c.reduce_scatter(np.ones(4), out=np.ones(2, "f4")),
        ValueError,
        "must have the dtype of the input",
    ),
    "out of other extents": (
        lambda c: c.allgather(np.ones((2, 3)), out=np.ones((4, 2))),
        ValueError,
        "the same shape but for the number of rows",
    ),
    "out to gather of another dtype": (
        lambda c: c.allgather(np.ones(2), out=np.ones(4, "f4")),
        ValueError,
        "must have the dtype of the input",
    ),
    "out to exchange of another dtype": (
        lambda c: c.alltoall(np.ones(2), send_counts=[1, 1], out=np.ones(2, "f4")),
        ValueError,
        "must have the dtype of the input",
    ),
    "overlapping out": (_overlapping, ValueError, "this rank's block of the input as output"),
    "exchange in place": (
        lambda c: (lambda a: c.alltoall(a, out=a))(np.ones(4)),
        ValueError,
        "two",
    ),
}


def do_wrong(seat: Seat, path: str, wrong: str) -> str:
    return refused_alone(seat, path, *WRONG[wrong][:2])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_gets_one_line_and_nothing_is_sent(
    ranks: Ranks, pair: str, wrong: str
) -> None:
    line = ranks.run(do_wrong, pair, wrong, on=range(2))[1]
    assert WRONG[wrong][2] in line
    assert "\n" not in line and len(line) < 300


def do_wrong_out(seat: Seat, path: str, wrong: str) -> Any:
    """What is wrong with `out` shows only when the rows are known: the others are not disturbed."""
    comm = seat.comm(path, 2)
    array = np.ones(4)
    out = {"rows": np.ones(7), "overlap": array[:4]}[wrong] if seat.rank == 1 else None
    results = []
    for call in (
        lambda: comm.allgather(array[:2], out=out),
        lambda: comm.alltoall(array, send_counts=[2, 2], out=out)[0],
    ):
        if seat.rank == 1:
            with pytest.raises(ValueError, match="out") as caught:
                call()
            assert not isinstance(caught.value, HsgdError)
            results.append("refused")
        else:
            results.append(call().tolist())
    assert comm.allreduce(np.ones(3)).tolist() == [2.0] * 3
    return results


@pytest.mark.parametrize("wrong", ["rows", "overlap"])
def test_an_out_that_does_not_fit_is_refused_where_it_is_and_disturbs_nobody(
    ranks: Ranks, wrong: str
) -> None:
    results = ranks.run(do_wrong_out, meeting_point(), wrong, on=range(2))
    assert results == [[[1.0] * 4] * 2, ["refused"] * 2]


MISMATCHES: dict[str, tuple[Callable[[Comm, bool], Any], str]] = {
    "counts": (
        lambda c, odd: c.reduce_scatter(np.ones(6), counts=[3, 2, 1] if odd else [2, 2, 2]),
        "rank 0 sent 6 float64 of shape (6,) in blocks of (2, 2, 2), "
        "rank 2 sent 6 float64 of shape (6,) in blocks of (3, 2, 1); "
        "call it with the same counts on every rank",
    ),
    "rows to scatter": (
        lambda c, odd: c.reduce_scatter(np.ones(7 if odd else 6)),
        "rank 0 sent 6 float64, rank 2 sent 7 float64",
    ),
    "op": (
        lambda c, odd: c.reduce_scatter(np.ones(6), "max" if odd else "sum"),
        "rank 0 called reduce_scatter of 6 float64 of shape (6,), sum; rank 2 called",
    ),
    "extents": (
        lambda c, odd: c.allgather(np.ones((2, 4 if odd else 3))),
        "rank 0 sent float64 of shape (:, 3), rank 2 sent float64 of shape (:, 4); "
        "call it with the same dtype and extents",
    ),
    "dtype": (
        lambda c, odd: c.allgather(np.ones(2, "f4" if odd else "f8")),
        "rank 0 sent float64, rank 2 sent float32",
    ),
    "name": (
        lambda c, odd: c.allgather(np.ones(2), name="b" if odd else "a"),
        'rank 0 called allgather "rows of a"',
    ),
    "rows to exchange": (
        lambda c, odd: c.alltoall(np.ones(6 if odd else 3)),
        "rank 0 sent float64 of shape (3,), rank 2 sent float64 of shape (6,)",
    ),
    "with and without counts": (
        lambda c, odd: c.alltoall(np.ones(3), send_counts=[1, 1, 1] if odd else None),
        'rank 0 called alltoall of float64 of shape (3,); rank 2 called alltoall "rows"',
    ),
    "kind": (
        lambda c, odd: c.barrier() if odd else c.reduce_scatter(np.ones(300_000)),
        "rank 0 called reduce_scatter of 300000 float64 of shape (300000,), sum; "
        "rank 2 called barrier",
    ),
}


def do_mismatch(seat: Seat, path: str, case: str) -> str:
    comm = seat.comm(path, 3)
    with pytest.raises(SignatureMismatch) as caught:
        MISMATCHES[case][0](comm, seat.rank == 2)
    for count in (3, 100_000):
        assert (comm.reduce_scatter(np.ones(count)) == 3).all()
    return str(caught.value)


@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_differently_are_told_alike(ranks: Ranks, case: str) -> None:
    lines = ranks.run(do_mismatch, meeting_point(), case, on=range(3))
    assert len(set(lines)) == 1
    assert MISMATCHES[case][1] in lines[0] and "\n" not in lines[0]
