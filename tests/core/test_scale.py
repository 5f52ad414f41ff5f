"""What a communicator and its arrays cost each rank, counted at several numbers of ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsgd import Comm
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(max(SIZES)) as pool:
        yield pool


def held() -> tuple[int, int]:
    """Mappings of shared memory, and descriptors, of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hsgd")
    return maps, len(os.listdir("/proc/self/fd"))


def do_count(seat: Seat, path: str, size: int) -> list[tuple[int, int]]:
    """What the communicator adds, then an array of each kind, and another communicator."""
    counts = [held()]
    with Comm.local(path, seat.rank, size, PATIENT) as comm:
        comm.barrier()
        counts.append(held())
        arrays = [comm.empty(5000)]
        counts.append(held())
        arrays.append(comm.shared(5000))
        counts.append(held())
        arrays.append(comm.empty(3 << 20))  # on huge pages where there are some
        counts.append(held())
        with comm.split(0) as other:
            other.barrier()
            counts.append(held())
    pairs = itertools.pairwise(counts)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_a_mapping_of_each_memory_and_a_descriptor_of_each_process(
    ranks: Ranks, size: int
) -> None:
    for first, *others in ranks.run(do_count, meeting_point(), size, on=range(size)):
        assert first == (1, size + 1)  # and one that tells when they end
        assert others == [(1, 0)] * 4
