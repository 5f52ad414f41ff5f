"""What a NotifiedWindow promises, as one list of checks for shared memory and for MPI alike.

Run under mpirun, this file is the program of the ranks: `python window_programs.py
mpi|sockets|remote_only` runs all checks, `python window_programs.py stalled|killed` ends one rank
and says what the others were told. Checks are collective: all ranks run all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hsgd import Comm, NotifiedWindow
from hsgd.config import Config
from outcomes import told_by

__all__ = [
    "CHECKS",
    "check_all",
]

SIZES = (0, 1, 7, 4093, 4096, 4099, 262_147)  # bytes
ROUNDS = 60
FAULT_TIMEOUT_S = 2.0


def meet(comm: Comm, window: NotifiedWindow) -> None:
    """A barrier within which writes of others go on: MPI may need the target's help for them."""
    here = comm.barrier_async()
    while not here.done():
        window.done(0)
        time.sleep(1e-4)
    here.wait()


def versions_never_come_before_their_data(comm: Comm, **options: Any) -> None:
    """A ring: each rank writes to the next, which acknowledges before it is overwritten."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with NotifiedWindow(comm, max(SIZES), 2, **options) as window:
        window.bind(0, before)
        window.bind(1, after)
        memory = window.segment()
        for version in range(1, ROUNDS + 1):
            size = SIZES[version % len(SIZES)]
            window.wait_any([1], version - 2) if version > 1 else None
            sent = np.full(size, version % 251, np.uint8)
            window.put_notify(sent, after, 0, version)
            assert window.wait_any([0], version - 1) == (0, version)
            assert (memory[:size] == version % 251).all()
            window.put_notify(None, before, 1, version)
        window.drain()
        meet(comm, window)


def a_list_is_told_of_once_and_as_a_whole(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 1000, comm.size, **options) as window:
        pieces = [
            (np.full(20, comm.rank, np.uint8), 100 * comm.rank),
            (np.full(10, 7.0 + comm.rank, np.float32), 100 * comm.rank + 20),
            (np.empty(0, np.float32), 0),
        ]
        for rank in range(comm.size):
            window.put_list_notify(pieces, rank, comm.rank, 1)
        for rank in range(comm.size):
            assert window.wait_any([rank]) == (rank, 1)
            part = window.segment()[100 * rank : 100 * rank + 60]
            assert (part[:20] == rank).all()
            assert (part[20:].view(np.float32) == 7.0 + rank).all()
        window.drain()
        meet(comm, window)


def later_versions_overwrite_earlier_ones(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 8, 3, **options) as window:
        peer = comm.size - 1 - comm.rank
        for version in (1, 2, 9):
            window.put_notify(None, peer, 1, version)
        window.drain()
        meet(comm, window)
        assert window.test(0) == 0 and window.test(1) == 9
        assert window.wait_any([0, 1, 2], [0, 8, 0]) == (1, 9)
        assert window.reset(1) == 9 and window.test(1) == 0
        meet(comm, window)
        window.put_notify(None, peer, 1, 10)
        assert window.wait_any([2, 1]) == (1, 10)
        window.drain()
        meet(comm, window)


def misuse_is_refused_by_name(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 64, 4, **options) as window:
        data, me = np.zeros(16, np.float32), comm.rank
        last = comm.size - 1

        def line(call: Callable[[], Any]) -> str:
            kind, text = told_by(call)
            assert kind == "ValueError" and "\n" not in text, (kind, text)
            return text

        window.put_notify(data, me, 0, 5)
        text = line(lambda: window.put_notify(data, me, 4, 1))
        assert f"slot 4 of rank {me}: there are slots 0 to 3" in text
        text = line(lambda: window.put_notify(data, comm.size, 0, 1))
        assert f"ranks are 0 to {last}" in text
        text = line(lambda: window.put_notify(data, me, 1, 1, offset=4))
        assert "64 bytes at offset 4 do not fit" in text and "has 64 bytes" in text
        text = line(lambda: window.put_notify(data, me, 0, 5))
        assert "version 5 does not follow 5" in text
        assert "version 0 does not follow 0" in line(lambda: window.put_notify(data, me, 1, 0))
        assert "version is -1" in line(lambda: window.put_notify(data, me, 1, -1))
        assert "no slots" in line(lambda: window.wait_any([]))
        assert "slots 0 to 3" in line(lambda: window.wait_any([4]))
        assert "slots 0 to 3" in line(lambda: window.test(4))
        assert "slots 0 to 3" in line(lambda: window.reset(4))
        assert "give one for each" in line(lambda: window.wait_any([1, 2], [0]))
        assert "is not a rank" in line(lambda: window.bind(0, comm.size))
        window.drain()
        meet(comm, window)
    kind, text = told_by(lambda: window.test(0))
    assert kind == "HsgdError" and text == "this NotifiedWindow is closed"


def two_writers_of_a_slot_are_noticed(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 8, 1, **options) as window:
        if comm.rank == 1:
            window.put_notify(None, 0, 0, 7)
            window.drain()
        meet(comm, window)
        if comm.rank == 0:
            assert window.test(0) == 7
            window.put_notify(None, 0, 0, 3)
            window.drain() if options.get("remote_only") else None
            kind, text = told_by(lambda: window.wait_any([0]))
            assert kind == "ValueError" and "went from version 7 back to 3" in text
        meet(comm, window)


def a_wait_that_ends_names_slot_and_writer_and_breaks_nothing(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 8, 2, **options) as window:
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        window.bind(1, before)
        for limit_s in (0.0, 0.05):
            kind, text = told_by(lambda s=limit_s: window.wait_any([1], timeout_s=s))
            assert kind == "CollectiveTimeout"
            assert f"slot 1 of rank {comm.rank}, which rank {before}" in text
            assert text.endswith("has nothing later than version 0")
        meet(comm, window)
        window.put_notify(None, after, 1, 1)
        assert window.wait_any([1]) == (1, 1)
        window.drain()
        meet(comm, window)


def threads_wait_beside_one_another(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 8, 4, **options) as window:
        after, seen = (comm.rank + 1) % comm.size, []

        def wait(slot: int) -> None:
            seen.append([window.wait_any([slot], version)[1] for version in range(20)])

        threads = [threading.Thread(target=wait, args=(slot,)) for slot in range(3)]
        for thread in threads:
            thread.start()
        for version in range(1, 21):
            for slot in range(3):
                window.put_notify(None, after, slot, version)
            if version < 20:
                meet(comm, window)
        window.drain()
        for thread in threads:
            thread.join()
        assert len(seen) == 3 and all(versions[-1] == 20 for versions in seen)
        assert all(versions == sorted(versions) for versions in seen)
        meet(comm, window)


def _other_node(comm: Comm) -> set[int]:
    """Ranks whose memory cannot be reached from here."""
    nodes = comm.allgather(np.array([comm.cross_rank], np.int64))
    return {rank for rank, node in enumerate(nodes) if node != comm.cross_rank}


def segments_of_this_node_can_be_reached(comm: Comm, **options: Any) -> None:
    with NotifiedWindow(comm, 16, 1, **options) as window:
        window.segment()[:] = comm.rank + 1
        meet(comm, window)
        far = _other_node(comm)
        for rank in range(comm.size):
            if rank in far:
                assert "is not a rank of this node" in told_by(lambda r=rank: window.segment(r))[1]
            else:
                assert (window.segment(rank) == rank + 1).all()
        meet(comm, window)


CHECKS = (
    versions_never_come_before_their_data,
    a_list_is_told_of_once_and_as_a_whole,
    later_versions_overwrite_earlier_ones,
    misuse_is_refused_by_name,
    two_writers_of_a_slot_are_noticed,
    a_wait_that_ends_names_slot_and_writer_and_breaks_nothing,
    threads_wait_beside_one_another,
    segments_of_this_node_can_be_reached,
)


def check_all(comm: Comm, **options: Any) -> list[str]:
    """Run every check; the names of those that passed, which are all or none."""
    for check in CHECKS:
        check(comm, **options)
    return [check.__name__ for check in CHECKS]


def _fault(how: str) -> None:
    """The last rank falls; rank 0 says what it is told by a wait and by a write, then ends."""
    comm = Comm(config=Config(timeout_s=20.0))
    window = NotifiedWindow(comm, 1 << 20, 3, queue=1, timeout_s=FAULT_TIMEOUT_S)
    victim = comm.size - 1
    window.bind(0, victim)
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stalled" else signal.SIGKILL)
    if comm.rank == 0:
        wait = told_by(lambda: window.wait_any([0]))

        data = np.ones(1 << 20, np.uint8)
        window.put_notify(data, victim, 1, 1)
        full = told_by(lambda: window.put_notify(data, victim, 2, 1, timeout_s=0.0))
        write = told_by(lambda: window.drain(10 * FAULT_TIMEOUT_S))
        after = told_by(lambda: window.put_notify(data, victim, 2, 1))
        report = {"wait": wait, "full": full, "write": write, "after": after}
        print(json.dumps(report), flush=True)
        os._exit(1)  # MPI cannot be finalized without the victim; mpirun ends what is left
    signal.pause()


def main() -> None:
    how = sys.argv[1]
    if how in ("stalled", "killed"):
        return _fault(how)
    comm = Comm(config=Config(timeout_s=20.0))
    passed = check_all(
        comm, **({"remote_only": True} if how == "remote_only" else {"network": how})
    )
    if comm.rank == 0:
        print(json.dumps(passed))
    comm.close()


if __name__ == "__main__":
    main()
