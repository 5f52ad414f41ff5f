"""Counters that begin just below where their words end: jobs pass that point, and nothing is amiss.

In the build for tests all counters begin at a number that is given: those of collectives, steps,
claims, messages, tickets, wake-ups (the futex words), looks and changes of a box; the signals of a
device have tests/device/test_device_counts.py. 32-bit words wrap below 2**32 and change their sign
at 2**31; the counts of the tree have 48 bits, the versions of a box's chunks 56. What has 64 bits
does not come to its end: a count each 100 ns takes 58,000 years. docs/internals/reliability.md
lists them.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fault_points
from hsgd import Comm, NotifiedWindow, ParameterBox
from hsgd.config import Config
from pretended_nodes import meet
from ranks import Ranks, Seat, meeting_point
from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

pytestmark = pytest.mark.long

BEFORE = 8  # counts to the end of the word
ENDS = (1 << 31, 1 << 32, 1 << 48)
ROUNDS = 12
FIXED = Config(chunk_bytes=4096, oneshot_bytes=1024, store="ordinary", timeout_s=60.0)
LARGE = 12_000  # float32: a dozen steps of a pipeline


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    fault_points.build()


def check_rounds(comm: Comm, pause_s: float = 0.0) -> None:
    """Collectives of all kinds and sizes, against the exact results."""
    rank, size = comm.rank, comm.size
    total = size * (size + 1) / 2
    shared = comm.empty(LARGE)
    for number in range(ROUNDS):
        for count in (1, 200, LARGE):
            given = np.full(count, rank + 1, np.float32)
            if number % size == rank:
                time.sleep(pause_s)  # the others fall asleep, and are woken
            assert (comm.allreduce(given) == total).all()
            assert (comm.broadcast(given.copy(), number % size) == number % size + 1).all()
            blocks = np.repeat(np.arange(1, size + 1), count)
            assert (comm.allgather(given) == blocks).all()
            many = np.tile(given, size)
            assert (comm.reduce_scatter(many) == total).all()
            assert (comm.alltoall(many) == blocks).all()
        shared[:] = rank + 1
        assert (comm.allreduce(shared, out=shared) == total).all()
        handles = [comm.allreduce_async(np.full(9, rank + 1, np.float32)) for _ in range(3)]
        assert all((handle.wait() == total).all() for handle in handles)
        comm.barrier()


def on_one_node(seat: Seat, path: str, size: int, first: int, config: Config) -> None:
    fault_points.count_from(first)
    with Comm.local(path, seat.rank, size, config) as comm:
        check_rounds(comm, 1e-3)


@pytest.mark.parametrize(
    "end", short_form("chaos", ENDS, keep={1}), ids=lambda end: f"2^{end.bit_length() - 1}"
)
@pytest.mark.parametrize("flat_ranks", [16, 1], ids=["flat", "tree"])
def test_ranks_of_a_node_pass_the_end_of_a_word(end: int, flat_ranks: int) -> None:
    config = dataclasses.replace(FIXED, flat_ranks=flat_ranks)
    with Ranks(3) as ranks:
        ranks.run(on_one_node, meeting_point(), 3, end - BEFORE, config)


def on_two_nodes(seat: Seat, folder: str, first: int) -> None:
    fault_points.count_from(first)
    with meet(seat, folder, [0, 0, 1], FIXED) as comm:
        check_rounds(comm)
        after = (comm.rank + 1) % comm.size
        with NotifiedWindow(comm, 100, 1, network="sockets", remote_only=True) as window:
            for version in range(first + 1, first + 4 * BEFORE):
                window.put_notify(np.full(100, version % 251, np.uint8), after, 0, version)
                assert window.wait_any([0], version - 1) == (0, version)
                assert (window.segment() == version % 251).all()
                comm.barrier()
            window.drain()
            comm.barrier()
        check_box(comm, first)


def check_box(comm: Comm, first: int) -> None:
    with ParameterBox.over(comm, np.zeros(5000, np.float32), chunk_bytes=256) as box:
        found = np.empty(5000, np.float32)
        for number in range(4 * BEFORE):
            box.accumulate(np.ones(5000, np.float32))
            comm.barrier()
            box.refresh()
            box.read(found)
            assert (found == comm.size * (number + 1)).all()
            comm.barrier()
        assert box.version > first  # else this was not the build for tests


@pytest.mark.parametrize(
    "end", short_form("chaos", ENDS, keep={1}), ids=lambda end: f"2^{end.bit_length() - 1}"
)
def test_nodes_over_tcp_pass_the_end_of_a_word(tmp_path: Path, end: int) -> None:
    with Ranks(3) as ranks:
        ranks.run(on_two_nodes, str(tmp_path), end - BEFORE)


def with_window_and_box(seat: Seat, path: str, first: int) -> None:
    fault_points.count_from(first)
    with Comm.local(path, seat.rank, 3, FIXED) as comm:
        check_box(comm, first)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with NotifiedWindow(comm, 100, 1) as window:
            window.bind(0, before)
            for number in range(1, 4 * BEFORE):
                if number % comm.size == comm.rank:
                    time.sleep(1e-3)
                window.put_notify(None, after, 0, number)
                assert window.wait_any([0], number - 1) == (0, number)
                comm.barrier()


@pytest.mark.parametrize(
    "end",
    short_form("chaos", [*ENDS, 1 << 56], keep={1, 3}),
    ids=lambda end: f"2^{end.bit_length() - 1}",
)
def test_windows_and_boxes_pass_the_end_of_a_word(end: int) -> None:
    """Those of 2**56 are the versions of chunks, whose word has room for the place, too."""
    with Ranks(3) as ranks:
        ranks.run(with_window_and_box, meeting_point(), end - BEFORE)


@pytest.mark.parametrize(
    "end", short_form("chaos", ENDS, keep={1}), ids=lambda end: f"2^{end.bit_length() - 1}"
)
def test_nodes_over_mpi_pass_the_end_of_a_word(cluster: Callable[..., Cluster], end: int) -> None:
    done = cluster(2).mpirun(3, [sys.executable, __file__, str(end - BEFORE)], timeout_s=120)
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stdout + done.stderr


def main() -> None:
    fault_points.count_from(int(sys.argv[1]))
    with Comm(config=FIXED) as comm:
        assert comm.cross_size == 2
        check_rounds(comm)
    print("done", flush=True)


if __name__ == "__main__":
    main()
