"""Wrong calls get one clear line before anything is mixed; the communicator stays usable."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsgd import CollectiveTimeout, Comm, PeerLost, SignatureMismatch
from hsgd.config import Config
from ranks import PATIENT, Outcome, Ranks, Seat, meeting_point
from wrong_calls import refused_alone

__all__: list[str] = []

MOST_RANKS = 4
BRIEF = Config(timeout_s=1.5)
QUICK_S = 10.0  # a set-up that fails at once: far from PATIENT's 30 s, even on a busy machine


def lines(outcomes: list[Outcome]) -> list[str]:
    """The message of each outcome's error, held to the rules for messages."""
    messages = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None, f"rank {rank} had no error but {outcome.value}"
        message = str(outcome.error)
        assert message and "\n" not in message and len(message) < 700, f"rank {rank}: {message!r}"
        messages.append(message)
    return messages


# --- arguments ---


def _read_only() -> np.ndarray:
    array = np.ones(4)
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[Callable[[Comm], Any], type[Exception], str]] = {
    "strided": (lambda c: c.allreduce(np.ones(8)[::2]), ValueError, "not C-contiguous"),
    "transposed": (lambda c: c.allreduce(np.ones((2, 3)).T), ValueError, "not C-contiguous"),
    "transposed tensor": (lambda c: c.allreduce(torch.ones(2, 3).T), ValueError, "contiguous"),
    "strided tensor": (lambda c: c.broadcast(torch.ones(8)[::2]), ValueError, "contiguous"),
    "expanded tensor": (lambda c: c.allreduce(torch.ones(1).expand(4)), ValueError, "contiguous"),
    "big-endian": (lambda c: c.allreduce(np.ones(4, ">f4")), TypeError, "big-endian"),
    "float128": (lambda c: c.allreduce(np.ones(4, np.longdouble)), TypeError, "float32, float64"),
    "complex": (lambda c: c.allreduce(np.ones(4, complex)), TypeError, "float32, float64"),
    "complex tensor": (lambda c: c.allreduce(torch.ones(4) * 1j), TypeError, "float32, float64"),
    "object": (lambda c: c.allreduce(np.array([None, 1])), TypeError, "float32, float64"),
    "bool": (lambda c: c.allreduce(np.ones(4, bool)), TypeError, "float32, float64"),
    "bool tensor": (lambda c: c.allreduce(torch.ones(4).bool()), TypeError, "float32, float64"),
    "uint16": (lambda c: c.allreduce(np.ones(4, "uint16")), TypeError, "float32, float64"),
    "int16 named": (
        lambda c: c.allreduce(np.ones(4, "int16")),
        TypeError,
        "dtype int16 is not supported; use one of float32",
    ),
    "int16 tensor named": (
        lambda c: c.allreduce(torch.ones(4).short()),
        TypeError,
        "dtype int16 is not supported",
    ),
    "complex64 named": (lambda c: c.allreduce(np.ones(4, "c8")), TypeError, "dtype complex64 is"),
    "bool tensor named": (lambda c: c.allreduce(torch.ones(4).bool()), TypeError, "dtype bool is"),
    "datetime": (lambda c: c.allreduce(np.zeros(4, "M8[s]")), TypeError, "float32, float64"),
    "structured": (lambda c: c.allreduce(np.zeros(4, "f4,f4")), TypeError, "float32, float64"),
    "strings": (lambda c: c.allreduce(np.array(["a", "b"])), TypeError, "float32, float64"),
    "sparse tensor": (lambda c: c.allreduce(torch.ones(4).to_sparse()), TypeError, "dense"),
    "meta tensor": (lambda c: c.allreduce(torch.ones(4, device="meta")), ValueError, "CPU"),
    "negated view": (
        lambda c: c.allreduce(torch._neg_view(torch.ones(4))),
        ValueError,
        "resolve_neg",
    ),
    "a list": (lambda c: c.allreduce([1.0], out=np.ones(1)), TypeError, "list is not an array"),
    "None": (lambda c: c.broadcast(None), TypeError, "NoneType is not an array"),
    "read-only out": (lambda c: c.allreduce(np.ones(4), out=_read_only()), ValueError, "read-only"),
    "read-only data": (lambda c: c.broadcast(_read_only()), ValueError, "read-only"),
    "bytes": (lambda c: c.broadcast(b"abc"), ValueError, "read-only"),
    "out of another shape": (
        lambda c: c.allreduce(np.ones(4), out=np.ones((2, 2))),
        ValueError,
        "shape",
    ),
    "out of another size": (lambda c: c.allreduce(np.ones(4), out=np.ones(5)), ValueError, "shape"),
    "out of another dtype": (
        lambda c: c.allreduce(np.ones(4), out=np.ones(4, "f4")),
        ValueError,
        "dtype",
    ),
    "overlapping out": (lambda c: _overlapping(c), ValueError, "overlap"),
    "unknown op": (
        lambda c: c.allreduce(np.ones(4), "avg"),
        ValueError,
        "sum, mean, min, max, prod",
    ),
    "mean of integers": (
        lambda c: c.allreduce(np.ones(4, int), "mean"),
        ValueError,
        "mean of int64",
    ),
    "negative root": (lambda c: c.broadcast(np.ones(4), root=-1), ValueError, "root -1"),
    "root too large": (lambda c: c.broadcast(np.ones(4), root=2), ValueError, "ranks are 0 to 1"),
}


def _overlapping(comm: Comm) -> Any:
    array = np.ones(10)
    return comm.allreduce(array[:8], out=array[2:])


def do_wrong(seat: Seat, path: str, wrong: str) -> str:
    return refused_alone(seat, path, *WRONG[wrong][:2])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_gets_one_line_and_nothing_is_sent(
    ranks: Ranks, pair: str, wrong: str
) -> None:
    line = ranks.run(do_wrong, pair, wrong, on=range(2))[1]
    assert WRONG[wrong][2] in line
    assert "\n" not in line and len(line) < 300


# --- set-up ---


def do_set_up(seat: Seat, path: str, places: list[tuple[int, int]], configs: list[Config]) -> str:
    """Each rank of the pool asks for the place and settings that a test gives it."""
    rank, size = places[seat.rank]
    config = configs[seat.rank % len(configs)]
    with Comm.local(path, rank, size, config) as comm:
        return f"rank {comm.rank}"


SET_UP = {
    "rank too large": ([(0, 1), (1, 1)], "rank 1 of 1"),
    "negative rank": ([(0, 1), (-1, 2)], "rank -1 of 2"),
    "size 0": ([(0, 1), (0, 0)], "rank 0 of 0"),
}


@pytest.mark.parametrize("case", SET_UP)
def test_a_rank_outside_of_the_size_is_refused(ranks: Ranks, case: str) -> None:
    places, words = SET_UP[case]
    outcome = ranks.outcomes(do_set_up, meeting_point(), places, [PATIENT], on=[1])[0]
    assert isinstance(outcome.error, ValueError) and words in lines([outcome])[0]


def test_two_ranks_with_the_same_number_are_told_apart_by_pid(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(
        do_set_up, meeting_point(), [(0, 3), (1, 3), (1, 3)], [BRIEF], on=range(3)
    )
    for outcome, line in zip(outcomes, lines(outcomes), strict=True):
        assert isinstance(
            outcome.error, (ValueError, CollectiveTimeout)
        )  # the second may come too late
        assert "rank 1 joined twice" in line or "rank 0 did not join" in line
    assert f"pids {ranks.pid(1)} and {ranks.pid(2)}" in str(outcomes[0].error).replace(
        f"pids {ranks.pid(2)} and {ranks.pid(1)}", f"pids {ranks.pid(1)} and {ranks.pid(2)}"
    )


def test_ranks_that_disagree_about_the_size_are_told_so(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(do_set_up, meeting_point(), [(0, 2), (1, 3)], [BRIEF], on=range(2))
    for outcome, line in zip(outcomes, lines(outcomes), strict=True):
        assert isinstance(outcome.error, ValueError)
        assert "rank 0 has size 2, rank 1 has size 3" in line


DIFFERENT = {
    "oneshot_bytes": (Config(timeout_s=9, oneshot_bytes=0), Config(timeout_s=9, oneshot_bytes=64)),
    "chunk_bytes": (Config(timeout_s=9, chunk_bytes=8192), Config(timeout_s=9, chunk_bytes=16384)),
    "chunk_bytes, same pages": (
        Config(timeout_s=9, chunk_bytes=4608),
        Config(timeout_s=9, chunk_bytes=5120),
    ),
    "flat_ranks": (Config(timeout_s=9, flat_ranks=1), Config(timeout_s=9, flat_ranks=2)),
    "slots": (Config(timeout_s=9, slots=3), Config(timeout_s=9, slots=4)),
    "store": (Config(timeout_s=9, store="ordinary"), Config(timeout_s=9, store="nontemporal")),
}


@pytest.mark.parametrize("setting", DIFFERENT)
def test_different_settings_are_refused_on_all_ranks(ranks: Ranks, setting: str) -> None:
    configs = list(DIFFERENT[setting])
    outcomes = ranks.outcomes(do_set_up, meeting_point(), [(0, 2), (1, 2)], configs, on=range(2))
    for outcome, line in zip(outcomes, lines(outcomes), strict=True):
        assert isinstance(outcome.error, ValueError)
        assert "different HSGD_* settings" in line


@pytest.mark.parametrize("name", ["t" * 120, "@" + "t" * 120, "", "/nonexistent/folder/socket"])
def test_an_unusable_path_is_refused_by_all_ranks(ranks: Ranks, name: str) -> None:
    outcomes = ranks.outcomes(do_set_up, name, [(0, 2), (1, 2)], [BRIEF], on=range(2))
    for line in lines(outcomes):
        assert "set-up" in line
        assert len(name) < 100 or "120" in line or "121" in line


def test_a_socket_left_by_a_killed_job_is_replaced_and_removed(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(path))
    assert path.is_socket()
    assert ranks.run(do_set_up, str(path), [(0, 2), (1, 2)], [PATIENT], on=range(2)) == [
        "rank 0",
        "rank 1",
    ]
    assert not path.exists()


def test_a_file_that_is_no_socket_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("a month of work")
    outcomes = ranks.outcomes(do_set_up, str(path), [(0, 2), (1, 2)], [BRIEF], on=range(2))
    assert str(path) in lines(outcomes)[0]
    assert path.read_text() == "a month of work"


def test_a_path_in_use_by_another_job_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    ranks.start(do_set_up, path, [(0, 2)], [PATIENT], on=[0])
    while not os.path.exists(path):
        os.sched_yield()
    places = [(0, 2), (0, 2), (1, 2)]
    (refused,) = ranks.outcomes(do_set_up, path, places, [PATIENT], on=[1])
    assert isinstance(refused.error, ValueError)
    assert "another job is using this path" in lines([refused])[0]
    assert ranks.run(do_set_up, path, places, [PATIENT], on=[2]) == ["rank 1"]
    assert ranks.finish(on=[0])[0].value == "rank 0"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_comes_is_named_to_all_others(ranks: Ranks, missing: int) -> None:
    present = [rank for rank in range(3) if rank != missing]
    places = [(rank, 3) for rank in range(3)]
    outcomes = ranks.outcomes(do_set_up, meeting_point(), places, [BRIEF], on=present)
    for outcome, line in zip(outcomes, lines(outcomes), strict=True):
        assert isinstance(outcome.error, CollectiveTimeout)
        assert outcome.error.rank == missing  # type: ignore[attr-defined]
        assert (
            "rank 0 did not join" if missing == 0 else f"rank(s) {missing} did not join"
        ) in line


def test_the_missing_rank_is_named_though_rank_0_came_late(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    places = [(rank, 3) for rank in range(3)]
    ranks.start(do_set_up, path, places, [Config(timeout_s=1.5)], on=[1])
    ranks.start(
        do_set_up, path, places, [Config(timeout_s=4.0)], on=[0]
    )  # its deadline passes later
    outcomes = ranks.finish(on=[1, 0])
    for outcome, line in zip(outcomes, lines(outcomes), strict=True):
        assert isinstance(outcome.error, CollectiveTimeout)
        assert "rank(s) 2 did not join" in line


def test_a_rank_that_dies_during_set_up_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    places = [(rank, 3) for rank in range(3)]
    with Ranks(3) as pool:
        pool.start(do_set_up, path, places, [PATIENT], on=[0, 1])
        while _watched(pool.pid(0)) < 2:  # itself, and rank 1 when it has introduced itself
            os.sched_yield()
        pool.signal(1, signal.SIGKILL)
        while pool.is_alive(1):
            os.sched_yield()
        pool.start(do_set_up, path, places, [PATIENT], on=[2])  # rank 0 tells late-comers, too
        for outcome in pool.finish(on=[0, 2], limit_s=QUICK_S):
            assert isinstance(outcome.error, PeerLost)
            assert f"rank 1 (pid {pool.pid(1)}) left" in lines([outcome])[0]
            assert outcome.error.rank == 1  # type: ignore[attr-defined]
    assert not os.path.exists(path)


def _watched(pid: int) -> int:
    """Descriptors of processes that a process holds."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "pidfd" in os.readlink(entry) or entry.resolve().name == "stat"
    return count


def do_set_up_on_cores(seat: Seat, path: str) -> list[float]:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable if seat.rank else {min(usable)})
    try:
        with Comm.local(path, seat.rank, 2, BRIEF) as comm:
            return comm.allreduce(np.ones(2)).tolist()
    finally:
        os.sched_setaffinity(0, usable)


def test_ranks_may_be_bound_to_different_numbers_of_cores(ranks: Ranks) -> None:
    assert ranks.run(do_set_up_on_cores, meeting_point(), on=range(2)) == [[2.0, 2.0]] * 2


# --- signatures ---

Call = Callable[[Comm, np.ndarray], Any]


def _sum(comm: Comm, data: np.ndarray, **more: Any) -> Any:
    return comm.allreduce(data, out=data, **more)


def _of(count: int) -> Call:
    return lambda comm, data: _sum(comm, data[:count])


# usual call, the call of the rank that differs, and what the message says of either
MISMATCHES: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "count": (_of(10), _of(12), ("10 float64", "12 float64")),
    "shape": (
        _of(12),
        lambda comm, data: _sum(comm, data[:12].reshape(3, 4)),
        ("of shape (12,)", "of shape (3, 4)"),
    ),
    "dtype": (
        _of(10),
        lambda comm, data: _sum(comm, data[:10].view("int64")),
        ("10 float64", "10 int64"),
    ),
    "op": (_of(10), lambda comm, data: _sum(comm, data[:10], op="max"), ("sum", "max")),
    "kind": (_of(10), lambda comm, _: comm.barrier(), ("allreduce", "barrier")),
    "broadcast": (
        _of(10),
        lambda comm, data: comm.broadcast(data[:10]),
        ("allreduce", "broadcast"),
    ),
    "root": (
        lambda comm, data: comm.broadcast(data, root=0),
        lambda comm, data: comm.broadcast(data, root=1),
        ("root 0", "root 1"),
    ),
    "name": (
        lambda comm, data: _sum(comm, data, name="fc.weight"),
        lambda comm, data: _sum(comm, data, name="fc.bias"),
        ('"fc.weight"', '"fc.bias"'),
    ),
    "no name": (lambda comm, data: _sum(comm, data, name="x"), _sum, ('"x"', "rank")),
    "long name": (
        lambda comm, data: _sum(comm, data, name="layer." * 40 + "weight"),
        lambda comm, data: _sum(comm, data, name="layer." * 40 + "bias"),
        ("name", "name"),
    ),
    "cut name": (
        lambda comm, data: _sum(comm, data, name="x" + "é" * 50),
        lambda comm, data: _sum(comm, data, name="ö" * 50),
        ("xé", "ö"),
    ),
    "regime": (_of(10), _of(1_000_000), ("10 float64", "1000000 float64")),
    "large kinds": (_sum, lambda comm, data: comm.broadcast(data), ("allreduce", "broadcast")),
    "large and barrier": (_sum, lambda comm, _: comm.barrier(), ("1000000 float64", "barrier")),
    "large and nothing": (_sum, _of(0), ("1000000 float64", "0 float64")),
    "many dimensions": (
        lambda comm, data: _sum(comm, data[:8].reshape(1, 1, 1, 1, 1, 1, 1, 2, 4)),
        lambda comm, data: _sum(comm, data[:8].reshape(1, 1, 1, 1, 1, 1, 1, 4, 2)),
        ("of shape (1, 1", "of shape (1, 1"),
    ),
}


# What the usual and the other call of a case are named, up to 63 bytes; elsewhere they have none.
NAMES: dict[str, tuple[str | None, str | None]] = {
    "name": ("fc.weight", "fc.bias"),
    "no name": ("x", None),
    "long name": (("layer." * 11)[:63], ("layer." * 11)[:63]),
    "cut name": ("x" + "é" * 31, "ö" * 31 + "\N{REPLACEMENT CHARACTER}"),
}


def do_mismatch(
    seat: Seat, path: str, size: int, case: str, odd: int
) -> tuple[str, int, tuple[int, int], tuple[str | None, str | None]]:
    comm = seat.comm(path, size)
    usual, other, _ = MISMATCHES[case]
    data = np.full(1_000_000, seat.rank + 1.0)
    with pytest.raises(SignatureMismatch) as caught:
        (other if seat.rank == odd else usual)(comm, data)
    assert (data == seat.rank + 1.0).all(), "the buffer was touched"
    for count in (3, 100_000):
        assert comm.allreduce(np.ones(count)).tolist() == [float(size)] * count
    comm.barrier()
    error = caught.value
    return str(error), error.rank, error.ranks, error.names


@pytest.fixture(scope="module")
def meetings() -> dict[int, str]:
    return {size: meeting_point() for size in (2, 3, 4)}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", MISMATCHES)
def test_ranks_that_call_differently_are_both_named_and_nothing_is_mixed(
    ranks: Ranks, meetings: dict[int, str], case: str, size: int
) -> None:
    for odd in {0, size - 1}:
        args = (meetings[size], size, case, odd)
        reports = ranks.run(do_mismatch, *args, on=range(size))
        assert len(set(reports)) == 1, "all ranks say the same"
        line, named, ranks_told, names = reports[0]
        assert "\n" not in line
        usual, other = MISMATCHES[case][2]
        first, second = (other, usual) if odd == 0 else (usual, other)
        assert "rank 0 " in line and f"rank {1 if odd == 0 else odd} " in line
        assert first in line and second in line
        assert named == (1 if odd == 0 else odd)
        assert ranks_told == (0, named)
        assert names == NAMES.get(case, (None, None))[:: -1 if odd == 0 else 1]


@pytest.mark.parametrize("size", [3, 4])
def test_three_different_calls_are_told_by_two_of_them(
    ranks: Ranks, meetings: dict[int, str], size: int
) -> None:
    reports = ranks.run(do_all_differ, meetings[size], size, on=range(size))
    assert (
        set(reports) == {reports[0]}
        and "rank 0 sent 1 float64, rank 1 sent 1000 float64" in reports[0]
    )


def do_all_differ(seat: Seat, path: str, size: int) -> str:
    comm = seat.comm(path, size)
    with pytest.raises(SignatureMismatch) as caught:
        comm.allreduce(np.ones(1000**seat.rank if seat.rank < 3 else 77))
    comm.barrier()
    return str(caught.value).partition(": ")[2]


# --- names and numbers ---


def do_call_named(seat: Seat, path: str) -> None:
    comm = Comm.local(path, seat.rank, 2, BRIEF)
    with contextlib.closing(comm):
        comm.barrier()
        if seat.rank == 1:
            seat.tell("there")
            seat.pipe.recv()
            return
        comm.allreduce(np.ones(4), name="fc.weight")


@pytest.mark.parametrize("is_killed", [False, True])
def test_who_waits_in_vain_is_told_the_name_of_the_call(is_killed: bool) -> None:
    with Ranks(2) as pool:
        pool.start(do_call_named, meeting_point())
        pool.hear(1)
        if is_killed:
            pool.signal(1, signal.SIGKILL)
        (outcome,) = pool.finish(on=[0])
        if not is_killed:
            pool.send(1, "go")
    assert isinstance(outcome.error, PeerLost if is_killed else CollectiveTimeout)
    assert 'allreduce #2 "fc.weight": ' in lines([outcome])[0]


def do_map_too_much(seat: Seat, path: str) -> None:
    import resource

    comm = Comm.local(path, seat.rank, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        comm.empty(64 << 20, np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        comm.close()


def test_addresses_that_are_refused_are_told_with_numbers() -> None:
    with Ranks(1) as pool:
        (outcome,) = pool.outcomes(do_map_too_much, meeting_point())
    assert isinstance(outcome.error, MemoryError), outcome.trace
    assert f"mapping {64 << 20} bytes failed" in str(outcome.error)
    assert "(ulimit -v: " in str(outcome.error)
