"""Signals between a device and the exchange thread: words of 32 bits that begin near their end."""

from __future__ import annotations

import dataclasses
import os

import pytest

import fault_points
from device_programs import LIBRARIES, Steps, simulator
from hsgd import Comm
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build

__all__: list[str] = []

pytestmark = pytest.mark.long  # builds the core once more
STEPS = 40  # each takes one signal at least


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build(LIBRARIES)
    fault_points.build()


def steps_from(seat: Seat, path: str, count: int) -> None:
    fault_points.count_from(count)
    os.environ["SIMCUDA_GPU"] = "0"
    device = simulator(seat.rank, 150)
    config = dataclasses.replace(
        PATIENT,
        cuda_library=str(LIBRARIES / "libsimcuda.so"),
        nccl_library="none",
        device_chunk_bytes=1 << 16,
    )
    with Comm.local(path, seat.rank, 2, config) as comm:
        Steps(comm, device, 1, 50_000).run(STEPS)


@pytest.mark.parametrize("end", [1 << 31, 1 << 32], ids=["2^31", "2^32"])
def test_signals_pass_the_end_of_their_word(end: int) -> None:
    with Ranks(2) as ranks:
        ranks.run(steps_from, meeting_point(), end - 8)
