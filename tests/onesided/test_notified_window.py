"""NotifiedWindow: the same promises over shared memory and over MPI, and an end to faults."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import window_programs
from hsgd import Comm, HsgdError, NotifiedWindow, QueueFull
from outcomes import told_by
from own_sockets import tcp_sockets
from ranks import Ranks, Seat, meeting_point
from toolkit.cluster import Cluster
from toolkit.forked_child import in_forked_child
from window_programs import CHECKS, FAULT_TIMEOUT_S, check_all

__all__: list[str] = []

PROGRAM = Path(window_programs.__file__)
NAMES = [check.__name__ for check in CHECKS]
DETECTED_S = 2.0
Job = Callable[..., subprocess.CompletedProcess[str]]


SOCKETS: dict[str, Any] = {"network": "sockets", "remote_only": True}


def run_checks(seat: Seat, path: str, size: int, options: dict[str, Any]) -> list[str]:
    """All checks on one rank."""
    return check_all(seat.comm(path, size), **options)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_window_over_shared_memory_keeps_its_promises(size: int) -> None:
    with Ranks(size) as pool:
        assert pool.run(run_checks, meeting_point(), size, {}) == [NAMES] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_window_over_sockets_keeps_the_same_promises(size: int) -> None:
    with Ranks(size) as pool:
        assert pool.run(run_checks, meeting_point(), size, SOCKETS) == [NAMES] * size


def test_a_window_over_mpi_alone_keeps_the_same_promises(mpirun: Job) -> None:
    done = mpirun(2, PROGRAM, "remote_only", timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == NAMES


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "network"),
    [("node1:1,node2:1", "mpi"), ("node1:2,node2:1", "mpi"), ("node1:2,node2:1", "sockets")],
)
def test_a_window_between_nodes_keeps_the_same_promises(
    cluster: Callable[..., Cluster], hosts: str, network: str
) -> None:
    size = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    done = cluster(2).mpirun(size, [sys.executable, str(PROGRAM), network], hosts=hosts)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == NAMES


def wait_for_a_far_rank(seat: Seat, path: str) -> tuple[str, str]:
    """What a rank is told that waits over sockets for one that wrote once, and then dies."""
    comm = seat.comm(path, 2)
    window = NotifiedWindow(comm, 64, 2, timeout_s=30.0, **SOCKETS)
    window.bind(0, 1 - seat.rank)
    window.put_notify(np.ones(4), 1 - seat.rank, 0, 1)
    assert window.wait_any([0]) == (0, 1)
    window.drain()
    seat.tell("waits")
    return told_by(lambda: window.wait_any([0], 1))


def test_a_rank_that_dies_is_missed_by_its_connection() -> None:
    with Ranks(2) as pool:
        pool.start(wait_for_a_far_rank, meeting_point())
        assert [pool.hear(rank) for rank in range(2)] == ["waits"] * 2
        pool.signal(1, signal.SIGKILL)
        (outcome,) = pool.finish(on=(0,))
        kind, line = outcome.value
        assert (
            kind == "PeerLost" and "rank 1 " in line and "died or closed its NotifiedWindow" in line
        )


def listening() -> set[tuple[str, int]]:
    """Addresses where this process takes TCP connections."""
    return {address for address, listens in tcp_sockets() if listens}


def stay_away(seat: Seat, path: str) -> int:
    """Strangers at the port of a NotifiedWindow: their bytes reach nobody, and the ranks go on."""
    comm = seat.comm(path, 2)
    before = listening()
    window = NotifiedWindow(comm, 4096, 1, timeout_s=30.0, **SOCKETS)
    refused = 0
    for address in listening() - before:
        with socket.create_connection(address, timeout=10) as stranger:
            stranger.sendall(b"\xff" * 64)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            refused += 1
    assert not window.segment().any()
    comm.barrier()
    window.put_notify(np.ones(4), 1 - seat.rank, 0, 1)
    assert window.wait_any([0]) == (0, 1)
    window.drain()
    comm.barrier()
    window.close()
    return refused


def test_strangers_cannot_write_over_sockets() -> None:
    with Ranks(2) as pool:
        assert sum(pool.run(stay_away, meeting_point())) >= 1


def open_a_queue_of_one(seat: Seat, path: str) -> None:
    comm = seat.comm(path, 2)
    window = NotifiedWindow(comm, 64 << 20, 2, queue=1, timeout_s=30.0, **SOCKETS)
    seat.kept["window"] = window
    if seat.rank == 0:
        window.put_notify(None, 1, 0, 5)
        window.drain()
    comm.barrier()


def put_into_a_full_queue(seat: Seat) -> list[tuple[str, str]]:
    """The other rank stands still, so a large write fills the queue until it goes on."""
    window: NotifiedWindow = seat.kept["window"]
    window.put_notify(np.ones(64 << 20, np.uint8), 1, 1, 1)
    full = told_by(lambda: window.put_notify(None, 1, 0, 9, timeout_s=0.0))
    used = told_by(lambda: window.put_notify(None, 1, 0, 5, timeout_s=0.0))
    seat.tell("full")
    window.drain()
    window.put_notify(None, 1, 0, 6)
    window.drain()
    return [full, used]


def test_a_version_that_found_the_queue_full_leaves_the_one_before_as_the_last() -> None:
    with Ranks(2) as pool:
        pool.run(open_a_queue_of_one, meeting_point())
        pool.stop(1)
        pool.start(put_into_a_full_queue, on=(0,))
        assert pool.hear(0) == "full"
        pool.signal(1, signal.SIGCONT)
        (outcome,) = pool.finish(on=(0,))
        (full, _), (used, line) = outcome.value or pytest.fail(outcome.trace)
        assert full == "QueueFull"
        assert used == "ValueError" and "version 5 does not follow 5" in line


STRANGERS = 1100  # more than a process may have files open, with the usual limit of 1024


def window_among_strangers(seat: Seat, path: str) -> int:
    """Both ranks connect to each other, behind the strangers; files that this rank has open."""
    comm = seat.comm(path, 2)
    window: NotifiedWindow = seat.kept["window"]
    window.put_notify(np.ones(4), 1 - seat.rank, 0, 1)
    assert window.wait_any([0]) == (0, 1)
    window.drain()
    comm.barrier()
    return len(os.listdir("/proc/self/fd"))


def open_the_window(seat: Seat, path: str) -> tuple[list[tuple[str, int]], int]:
    """Where this rank listens, and how many files it has open; few may be."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = listening()
    comm = seat.comm(path, 2)
    seat.kept["window"] = NotifiedWindow(comm, 4096, 1, timeout_s=30.0, **SOCKETS)
    comm.barrier()
    return list(listening() - before), len(os.listdir("/proc/self/fd"))


@pytest.mark.long
def test_a_thousand_silent_strangers_take_no_files_and_keep_nobody_out() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * STRANGERS), hard))
    try:
        with Ranks(2) as pool, contextlib.ExitStack() as strangers:
            (_, (addresses, own)) = pool.run(open_the_window, path := meeting_point())
            (address,) = addresses
            for number in range(STRANGERS):
                stranger = socket.socket()
                strangers.enter_context(stranger)
                stranger.setblocking(False)  # the kernel takes as many as its queue is long
                stranger.connect_ex(address)
                if number % 10 == 0:
                    with contextlib.suppress(OSError):
                        stranger.send(b"\xff" * 20)
            for files in pool.run(window_among_strangers, path):
                assert files < own + 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
def test_a_rank_that_stalls_on_another_node_ends_waits_and_writes_in_time(
    cluster: Callable[..., Cluster],
) -> None:
    done = cluster(2).mpirun(2, [sys.executable, str(PROGRAM), "stalled"], timeout_s=60.0)
    report = json.loads(done.stdout.splitlines()[0])
    assert all("\n" not in line for _, line in report.values())
    kind, line = report["wait"]
    assert kind == "CollectiveTimeout"
    assert line.startswith(f"wait_any: after {FAULT_TIMEOUT_S:g} s slot 0 of rank 0, which rank 1")
    kind, line = report["full"]
    assert kind == "QueueFull" and "version 1 for slot 2 of rank 1: all 1 operations" in line
    assert "the oldest is version 1 for slot 1 of rank 1" in line
    kind, line = report["write"]
    assert kind == "CollectiveTimeout"
    assert f"version 1 for slot 1 of rank 1 was not delivered within {FAULT_TIMEOUT_S:g} s" in line
    assert report["after"] == report["write"]  # what follows a write that is lost cannot be trusted


def test_a_rank_that_dies_on_another_node_ends_the_job(cluster: Callable[..., Cluster]) -> None:
    done = cluster(2).mpirun(2, [sys.executable, str(PROGRAM), "killed"], timeout_s=60.0)
    assert done.returncode != 0


def wait_for_the_last(seat: Seat, path: str, size: int, limit_s: float) -> tuple[str, str, float]:
    """Wait for a slot that the last rank notifies; the last rank waits for the first."""
    comm = seat.comm(path, size)
    window = NotifiedWindow(comm, 64, 1, timeout_s=limit_s)
    window.bind(0, size - 1 if seat.rank != size - 1 else 0)
    comm.barrier()
    seat.tell("waits")
    kind, line = told_by(lambda: window.wait_any([0]))
    return kind, line, time.monotonic()


def test_a_local_rank_that_dies_is_named_to_those_that_wait_for_it() -> None:
    with Ranks(3) as pool:
        pool.start(wait_for_the_last, meeting_point(), 3, 30.0)
        assert [pool.hear(rank) for rank in range(3)] == ["waits"] * 3
        pid = pool.pid(2)
        pool.signal(2, signal.SIGKILL)
        killed = time.monotonic()
        for outcome in pool.finish(on=(0, 1)):
            kind, line, when = outcome.value
            assert kind == "PeerLost" and f"rank 2 (pid {pid}, " in line
            assert line.endswith(" died") and line.startswith("wait_any, slot 0")
            assert when - killed < DETECTED_S


def test_a_local_rank_that_is_stopped_ends_waits_at_the_deadline() -> None:
    with Ranks(2) as pool:
        pool.start(wait_for_the_last, meeting_point(), 2, 0.5)
        assert [pool.hear(rank) for rank in range(2)] == ["waits"] * 2
        pool.signal(1, signal.SIGSTOP)
        (outcome,) = pool.finish(on=(0,))
        pool.signal(1, signal.SIGCONT)
        pool.finish(on=(1,))
        kind, line, _ = outcome.value
        assert kind == "CollectiveTimeout"
        assert f"slot 0 of rank 0, which rank 1 (pid {pool.pid(1)}, " in line


def use_in_a_fork(seat: Seat, path: str) -> tuple[str, str]:
    """What a forked child is told by a NotifiedWindow that it inherited."""
    comm = seat.comm(path, 1)
    window = NotifiedWindow(comm, 64, 1)
    report: tuple[str, str] = in_forked_child(lambda: told_by(lambda: window.test(0)))
    window.put_notify(np.ones(4), 0, 0, 1)
    assert window.wait_any([0]) == (0, 1)
    return report


def test_a_forked_child_may_not_use_a_window() -> None:
    with Ranks(1) as pool:
        ((kind, line),) = pool.run(use_in_a_fork, meeting_point())
        assert kind == "HsgdError" and "belongs to the process that made it" in line


def connections_of_a_fork(seat: Seat, path: str) -> tuple[int, int]:
    """TCP sockets of a rank whose windows use them, and of its child."""
    comm = seat.comm(path, 2)
    window = NotifiedWindow(comm, 64, 1, timeout_s=30.0, **SOCKETS)
    window.put_notify(np.ones(4), 1 - seat.rank, 0, 1)
    window.wait_any([0])
    window.drain()
    of_child: int = in_forked_child(lambda: len(tcp_sockets()))
    window.put_notify(np.ones(4), 1 - seat.rank, 0, 2)  # which changes nothing here
    window.wait_any([0], 1)
    window.drain()
    own = len(tcp_sockets())
    comm.barrier()  # whose end may bring that of the other rank's connections
    return own, of_child


def test_a_forked_child_leaves_the_connections() -> None:
    with Ranks(2) as pool:
        for own, of_child in pool.run(connections_of_a_fork, meeting_point()):
            assert own >= 3 and of_child == 0  # to listen, to send, to receive


def close_in_any_order(seat: Seat, path: str) -> list[str]:
    """Views outlive the window, which the communicator closes, and other sizes are refused."""
    comm = Comm.local(path, seat.rank, 2)
    with pytest.raises(HsgdError, match="window"):
        NotifiedWindow(comm, 64 + seat.rank, 1)
    window = NotifiedWindow(comm, 64, 1)
    view = window.segment()
    view[:] = 3
    comm.close()
    assert window.closed and (view == 3).all()
    return [told_by(lambda: window.put_notify(None, 0, 0, 1))[1], repr(window)]


def test_closing_the_communicator_closes_its_windows() -> None:
    with Ranks(2) as pool:
        for rank, (line, text) in enumerate(pool.run(close_in_any_order, meeting_point())):
            assert line == "this NotifiedWindow is closed"
            assert text == f"<hsgd.NotifiedWindow rank {rank}, closed>"


def two_threads_write_one_slot(seat: Seat, path: str) -> str:
    """What rank 0 is told that sends version 6, when a wait with version 9 was in vain and one with
    version 10 goes on; the target takes nothing, so that each wait begins when the test has seen
    the one before.
    """
    comm = seat.comm(path, 2)
    window = NotifiedWindow(comm, 64 << 20, 2, queue=1, timeout_s=60.0, **SOCKETS)
    target = int(comm.allgather(np.array([os.getpid()]))[1])
    line = ""
    if seat.rank == 0:
        window.put_notify(None, 1, 0, 5)
        window.drain()
        os.kill(target, signal.SIGSTOP)
        window.put_notify(np.zeros(64 << 20, np.uint8), 1, 1, 1)  # fills the queue

        def put(version: int, timeout_s: float) -> None:
            with contextlib.suppress(QueueFull):
                window.put_notify(None, 1, 0, version, timeout_s=timeout_s)

        threads = []
        for version, timeout_s in ((9, 5.0), (10, 60.0)):
            threads.append(threading.Thread(target=put, args=(version, timeout_s)))
            threads[-1].start()
            while f"does not follow {version}," not in line:
                line = told_by(lambda: window.put_notify(None, 1, 0, 1))[1]
        threads[0].join()
        line = told_by(lambda: window.put_notify(None, 1, 0, 6, timeout_s=0.0))[1]
        os.kill(target, signal.SIGCONT)
        threads[1].join()
        window.drain()
    comm.barrier()
    window.close()
    return line


@pytest.mark.long
def test_a_wait_in_vain_does_not_let_an_older_version_follow_a_later_one() -> None:
    with Ranks(2) as pool:
        line, _ = pool.run(two_threads_write_one_slot, meeting_point())
    assert "version 6 does not follow 10" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"slots": 0}, "slots is 0; give 1 to"),
        ({"queue": 0}, "queue is 0; give 1 to"),
        ({"timeout_s": 0.0}, "timeout_s is 0"),
        ({"slice_bytes": 100}, "slice_bytes is 100; give 4096 to"),
        ({"segment_bytes": -1}, "segment_bytes is -1"),
        ({"network": "pigeons"}, 'network is \'pigeons\'; give "auto", "mpi" or "sockets"'),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], line: str) -> None:
    values = {"segment_bytes": 64, "slots": 1, **options}
    with Comm.local(meeting_point(), 0, 1) as comm, pytest.raises(ValueError, match=line):
        NotifiedWindow(comm, values.pop("segment_bytes"), values.pop("slots"), **values)


def ask_for_other_windows(seat: Seat, path: str) -> list[tuple[str, str]]:
    comm = seat.comm(path, 2)
    own = [(64 + 64 * seat.rank, 4), (64, 4 + seat.rank)]
    told = [
        told_by(lambda size=size, slots=slots: NotifiedWindow(comm, size, slots))
        for size, slots in own
    ]
    NotifiedWindow(comm, 64, 4).close()
    return told


def test_ranks_that_ask_for_other_windows_are_told() -> None:
    with Ranks(2) as pool:
        for told in pool.run(ask_for_other_windows, meeting_point()):
            for kind, line in told:
                assert kind == "SignatureMismatch" and '"window"' in line
                assert "rank 0" in line and "rank 1" in line


PUT: dict[str, Any] = {"pieces": [], "target": 0, "slot": 0, "version": 1}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"order": 2**32}, "NotifiedWindow: order is 4294967296; give 4294967295 or less"),
        ({"order": -1}, "NotifiedWindow: order is -1; give 0 or more"),
        ({"target": 2**31}, "NotifiedWindow: target is 2147483648; give -2147483647 to 2147483647"),
        ({"target": 1}, "put_notify: rank 1 is not a rank; ranks are 0 to 0"),
        (
            {"version": 2**64},
            "NotifiedWindow: version is 18446744073709551616; give 9223372036854775807",
        ),
        ({"slot": 2**32}, "NotifiedWindow: slot is 4294967296; give 4294967295 or less"),
        ({"timeout_s": "soon"}, "NotifiedWindow: timeout_s is 'soon'"),
    ],
    ids=str,
)
def test_a_write_with_values_that_cannot_work_is_refused_in_words(
    values: dict[str, Any], line: str
) -> None:
    with (
        Comm.local(meeting_point(), 0, 1) as comm,
        NotifiedWindow(comm, 64, 1) as window,
        pytest.raises((ValueError, TypeError), match=line),
    ):
        window.put_list_notify(**{**PUT, **values})


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            ("bind", 0, 2**31),
            "NotifiedWindow: source is 2147483648; give -2147483647 to 2147483647",
        ),
        (("bind", 0, 1), "bind: rank 1"),
        (("bind", 0, "one"), "NotifiedWindow: source is 'one' .str.; give a whole number"),
        (("segment", 2**31), "NotifiedWindow: rank is 2147483648; give -2147483647 to 2147483647"),
        (("done", -1), "NotifiedWindow: ticket is -1; give 0 or more"),
        (("wait_any", [2**32]), "NotifiedWindow: slot is 4294967296; give 4294967295 or less"),
        (("wait_any", [0], -1), "NotifiedWindow: seen is -1; give 0 or more"),
    ],
    ids=str,
)
def test_other_calls_with_values_that_cannot_work_are_refused_in_words(
    call: tuple[Any, ...], line: str
) -> None:
    name, *values = call
    with (
        Comm.local(meeting_point(), 0, 1) as comm,
        NotifiedWindow(comm, 64, 1) as window,
        pytest.raises((ValueError, TypeError), match=line),
    ):
        getattr(window, name)(*values)


@pytest.mark.long
def test_a_communicator_keeps_nothing_of_windows_that_are_gone() -> None:
    def make(count: int) -> None:
        for _ in range(count):
            NotifiedWindow(comm, 64, 1).close()

    with Comm.local(meeting_point(), 0, 1) as comm:
        make(100)
        tracemalloc.start()
        try:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            make(1000)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 20_000  # 20 bytes for each
