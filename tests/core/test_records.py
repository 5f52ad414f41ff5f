"""Records: what collectives spent their time on, level by level."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from hsgd.comm.record import Record
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

MOST_RANKS = 3
LARGE = 300_000


def recorded(seat: Seat, path: str, size: int) -> tuple[float, float, list[Record]]:
    """The clock before and after, and the records of what was called between."""
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.allreduce(np.ones(4), name="not asked for")
        shared = comm.empty(LARGE)
        comm.keep_records(100)
        before_s = time.monotonic()
        comm.allreduce(np.ones(4), name="small")
        comm.allreduce(np.ones(LARGE), name="staged")
        comm.allreduce(shared, out=shared, name="in place")
        comm.broadcast(np.ones(LARGE), 0, name="broadcast")
        comm.reduce_scatter(np.ones(LARGE), name="scattered")
        comm.allreduce_async(np.ones(4), name="é" * 50).wait()
        after_s = time.monotonic()
        records = comm.take_records()
        assert comm.take_records() == []
        comm.keep_records(1)
        comm.allreduce(np.ones(4))
        comm.allgather(np.ones(3), name="last")
        (last,) = comm.take_records()
        assert last.name == "last"
        comm.allreduce(np.ones(4))
        comm.keep_records(0)
        comm.allreduce(np.ones(4))
        assert comm.take_records() == []
        return before_s, after_s, records


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_collective_has_one_record_with_the_levels_it_went_through(
    ranks: Ranks, size: int
) -> None:
    answers: list[Any] = ranks.run(recorded, meeting_point(), size, on=range(size))
    for rank, (before_s, after_s, records) in enumerate(answers):
        names = [record.name for record in records]
        assert names[:5] == ["small", "staged", "in place", "broadcast", "scattered"]
        assert names[5].startswith("é" * 31) and len(names) == 6
        sizes = [record.payload_bytes for record in records[:3]]
        assert sizes == [32, 8 * LARGE, 4 * LARGE]
        for earlier, later in itertools.pairwise(records):
            assert earlier.call.end_s <= later.call.begin_s
        assert before_s <= records[0].call.begin_s and records[-1].call.end_s <= after_s
        for record in records:
            levels = [record.intra_reduce, record.inter, record.intra_gather]
            for span in [level for level in levels if level is not None]:
                assert record.call.begin_s <= span.begin_s <= span.end_s <= record.call.end_s
                assert 0 <= span.busy_s <= span.end_s - span.begin_s + 1e-9
            assert record.wait_s >= 0 and record.inter is None
        by_name = {record.name: record for record in records}
        if size > 1:
            assert by_name["small"].intra_reduce and by_name["staged"].intra_reduce
            assert by_name["staged"].intra_gather
            assert by_name["scattered"].intra_reduce
            assert bool(by_name["broadcast"].intra_reduce) == (rank == 0)
            assert bool(by_name["broadcast"].intra_gather) == (rank != 0)
    # Where ranks outnumber cores, whoever runs does the work.
    assert size == 1 or any(records[2].intra_reduce for _, _, records in answers)
