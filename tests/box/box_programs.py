"""What a ParameterBox promises, as one list of checks for shared memory and for several nodes.

Checks are collective: all ranks run all of them. Run under mpirun, this file is the program of the
ranks. Values are small integers, so float32 sums are exact in any order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from hsgd import Comm, ParameterBox
from hsgd.config import Config
from outcomes import told_by

__all__ = ["CHECKS", "FAULT_TIMEOUT_S", "check_all"]

COUNTS = (1, 15, 16, 17, 1000)  # values; chunks of 16
FAULT_TIMEOUT_S = 2.0
SMALL = {"chunk_bytes": 64, "timeout_s": 20.0}


def values_of(box: ParameterBox) -> np.ndarray[Any, Any]:
    """All values, with everything that was pushed before."""
    box.refresh()
    out = np.empty(box.count, np.float32)
    box.read(out)
    return out


def what_is_pushed_adds_up(comm: Comm, **options: Any) -> None:
    for count in COUNTS:
        start = np.arange(count, dtype=np.float32)
        with ParameterBox.over(comm, start, **SMALL, **options) as box:
            assert (box.count, len(box)) == (count, count)
            assert (values_of(box) == start).all()
            comm.barrier()
            for push in range(1, 21):
                box.accumulate(np.full(count, push * (comm.rank + 1), np.float32))
            comm.barrier()
            ranks = comm.size * (comm.size + 1) // 2
            assert (values_of(box) == start + 210 * ranks).all()
            comm.barrier()
            if comm.rank == comm.size - 1:
                box.write(start)
            comm.barrier()
            assert (values_of(box) == start).all()
            comm.barrier()


def parts_are_where_they_were_put(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(100, np.float32), **SMALL, **options) as box:
        for offset, count in ((0, 100), (3, 5), (15, 2), (16, 16), (90, 10), (99, 1), (40, 0)):
            box.accumulate(np.ones(count, np.float32), offset)
            comm.barrier()
            expected = np.zeros(100)
            expected[offset : offset + count] = comm.size
            assert (values_of(box) == expected).all(), (offset, count)
            part = np.full(count, -1, np.float32)
            box.read(part, offset)
            assert (part == expected[offset : offset + count]).all()
            comm.barrier()
            if comm.rank == 0:
                box.write(np.zeros(count, np.float32), offset)
            comm.barrier()


def a_rank_reads_what_it_pushed(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(comm.size * 40, np.float32), **SMALL, **options) as box:
        offset, own = comm.rank * 40, np.empty(40, np.float32)
        for push in range(1, 51):
            box.accumulate(np.ones(40, np.float32), offset)
            box.read(own, offset)
            assert (own == push).all()
        comm.barrier()


def versions_count_changes(comm: Comm, **options: Any) -> None:
    out = np.empty(50, np.float32)
    with ParameterBox.over(comm, np.zeros(50, np.float32), **SMALL, **options) as box:
        comm.barrier()
        last = 0
        for _ in range(30):
            created = box.accumulate(np.ones(50, np.float32))
            assert last < created
            last = box.read(out)
            # Between nodes changes of others may be counted before it that are not here yet.
            assert created <= last or comm.cross_size > 1
        comm.barrier()
        box.refresh()
        assert box.read(out) == box.version == 30 * comm.size
        comm.barrier()


def a_version_that_is_told_is_had(comm: Comm, **options: Any) -> None:
    ones, out = np.ones(100, np.float32), np.empty(100, np.float32)
    with ParameterBox.over(comm, np.zeros(100, np.float32), **SMALL, **options) as box:
        if comm.cross_size > 1:
            box._block = 32  # a change takes several letters, between which others come
        comm.barrier()
        for push in range(40):
            box.accumulate(ones)
            if push % 8 == 0:
                box.refresh()
            report = box.read(out)
            assert out.min() >= report, (out.min(), report)
            report, _ = box.elastic([np.zeros(100, np.float32)], -1.0, out)  # the values
            assert out.min() >= report, (out.min(), report)
        comm.barrier()


def a_rank_alone_is_told_of_all_its_changes(comm: Comm, **options: Any) -> None:
    ones, out = np.ones(100, np.float32), np.empty(100, np.float32)
    with ParameterBox.over(comm, np.zeros(100, np.float32), **SMALL, **options) as box:
        for rank in range(comm.size):
            for _ in range(3 if comm.rank == rank else 0):
                created = box.accumulate(ones)
                assert box.read(out) == created
            comm.barrier()


def counters_hand_out_each_number_once(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(4, np.float32), counters=3, **SMALL, **options) as box:
        taken = np.array([box.fetch_add(1) for _ in range(50)], np.int64)
        everybodys = comm.allgather(taken)
        assert sorted(everybodys) == list(range(50 * comm.size))
        assert (box.counter(0), box.counter(1), box.counter(2)) == (0, 50 * comm.size, 0)
        comm.barrier()
        box.fetch_add(2, -5 * comm.rank)
        comm.barrier()
        assert box.counter(2) == -5 * (comm.size * (comm.size - 1) // 2)
        comm.barrier()


def counters_wait_for_no_push(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(4, np.float32), counters=1, **SMALL, **options) as box:
        mail = getattr(box, "_mail", None)  # between nodes
        with contextlib.nullcontext() if mail is None else mail._values.lock:  # as a push has it
            box.fetch_add(0)
        comm.barrier()
        assert box.counter(0) == comm.size
        comm.barrier()


def bfloat16_is_added_in_float32(comm: Comm, **options: Any) -> None:
    import torch

    with ParameterBox.over(comm, np.full(70, 1024, np.float32), **SMALL, **options) as box:
        box.accumulate(torch.full((70,), 0.5, dtype=torch.bfloat16))
        comm.barrier()
        assert (values_of(box) == 1024 + 0.5 * comm.size).all()
        comm.barrier()


def weights_and_values_attract_each_other(comm: Comm, **options: Any) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        start = np.arange(90, dtype=np.float32)
        with ParameterBox.over(comm, start, **SMALL, **options) as box:
            shapes = [(3, 7), (0,), (5,), (64,)]
            weights = [torch.full(shape, 8.0 * (comm.rank + 1)) for shape in shapes]
            delta = torch.zeros(90, dtype=dtype)
            before = torch.cat([w.reshape(-1) for w in weights])
            version, squares = box.elastic(weights, 0.25, delta)
            assert version == 0
            expected = (0.25 * (before - torch.from_numpy(start))).to(dtype)
            assert torch.equal(delta, expected)
            after = torch.cat([w.reshape(-1) for w in weights])
            assert torch.equal(after, before - expected.float())
            difference = before.double() - torch.from_numpy(start).double()
            assert np.isclose(squares, float((difference**2).sum()), rtol=1e-6)
            comm.barrier()
            box.accumulate(delta)
            comm.barrier()
            total = comm.allreduce(delta.float().contiguous())
            assert np.array_equal(values_of(box), start + total.numpy())
            comm.barrier()


def pulling_and_pushing_in_one_pass_loses_nothing(comm: Comm, **options: Any) -> None:
    import torch

    with ParameterBox.over(comm, np.full(90, 64.0, np.float32), **SMALL, **options) as box:
        comm.barrier()
        weights = [torch.full((30,), 64.0 * comm.rank) for _ in range(3)]
        for _ in range(3):
            box.elastic(weights, 0.5)
        mine = torch.cat(weights)
        comm.barrier()
        sums = comm.allreduce(mine) + torch.from_numpy(values_of(box))
        assert (sums == 64.0 + sum(64.0 * rank for rank in range(comm.size))).all()
        comm.barrier()


def misuse_is_refused_by_name(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(20, np.float32), counters=2, **SMALL, **options) as box:
        ones = np.ones(20, np.float32)
        for method in (box.accumulate, box.write, box.read):
            kind, line = told_by(lambda m=method: m(np.ones(21, np.float32)))
            assert kind == "ValueError" and "21 values from place 0 do not fit" in line
            kind, line = told_by(lambda m=method: m(ones, 1))
            assert kind == "ValueError" and "which has 20" in line
            assert told_by(lambda m=method: m(ones, -1))[0] == "ValueError"
            kind, line = told_by(lambda m=method: m(np.ones(20, np.float64)))
            assert kind == "TypeError" and "float64" in line and "float32" in line
            assert (
                told_by(lambda m=method: m(np.ones((20, 2), np.float32)[:, 0]))[0] == "ValueError"
            )
        assert "counter 2" in told_by(lambda: box.fetch_add(2))[1]
        assert told_by(lambda: box.elastic([ones], 0.5, np.ones(19, np.float32)))[0] == "ValueError"
        assert told_by(lambda: box.elastic([ones, ones], 0.5))[0] == "ValueError"
        comm.barrier()
        assert (values_of(box) == 0).all()
        comm.barrier()
    for call in (lambda: box.read(ones), lambda: box.version, lambda: box.fetch_add(0)):
        kind, line = told_by(call)
        assert kind == "HsgdError" and line == "this ParameterBox is closed"


def threads_push_beside_one_another(comm: Comm, **options: Any) -> None:
    with ParameterBox.over(comm, np.zeros(100, np.float32), **SMALL, **options) as box:

        def push() -> None:
            for _ in range(20):
                box.accumulate(np.ones(100, np.float32))

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        comm.barrier()
        assert (values_of(box) == 60 * comm.size).all()
        comm.barrier()


CHECKS = (
    what_is_pushed_adds_up,
    parts_are_where_they_were_put,
    a_rank_reads_what_it_pushed,
    versions_count_changes,
    a_version_that_is_told_is_had,
    a_rank_alone_is_told_of_all_its_changes,
    counters_hand_out_each_number_once,
    counters_wait_for_no_push,
    bfloat16_is_added_in_float32,
    weights_and_values_attract_each_other,
    pulling_and_pushing_in_one_pass_loses_nothing,
    misuse_is_refused_by_name,
    threads_push_beside_one_another,
)


def check_all(comm: Comm, **options: Any) -> list[str]:
    """Run every check; the names of those that passed, which are all or none."""
    for check in CHECKS:
        check(comm, **options)
    return [check.__name__ for check in CHECKS]


def _missing_owner() -> None:
    """Rank 0, the owner, stops; the last rank says what it is told, then ends."""
    comm = Comm(config=Config(timeout_s=20.0))
    values = np.ones(100, np.float32)
    box = ParameterBox.over(comm, values, shards=None, timeout_s=FAULT_TIMEOUT_S)
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    report = {
        "push": told_by(lambda: box.accumulate(values)),
        "count": told_by(lambda: box.fetch_add(0)),
    }
    box.read(values)  # the node's copy is still there
    print(json.dumps([report, values.tolist() == [1.0] * 100]), flush=True)
    os._exit(1)  # MPI cannot be finalized without the owner; mpirun ends what is left


def main() -> None:
    """`python box_programs.py SHARDS NETWORK` under mpirun: rank 0 prints what has passed."""
    if sys.argv[1] == "missing":
        return _missing_owner()
    options = {"shards": None if sys.argv[1] == "none" else sys.argv[1], "network": sys.argv[2]}
    comm = Comm(config=Config(timeout_s=60.0, chunk_bytes=65536, oneshot_bytes=1024))
    passed = check_all(comm, **options)
    if comm.rank == 0:
        print(json.dumps(passed))
    comm.close()


if __name__ == "__main__":
    main()
