"""Collectives on a simulated device, in random order on several streams, against NumPy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from device_programs import LIBRARIES, Steps, simulator
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Layout:
    """Nodes of the ranks, one unless there are several; nccl: a device for each rank."""

    nodes: tuple[int, ...]
    nccl: bool = False

    @property
    def name(self) -> str:
        way = "NCCL" if self.nccl else "host memory"
        return f"{''.join(map(str, self.nodes))} {way}"


LAYOUTS = [
    *(Layout((0,) * size) for size in (1, 2, 3, 4)),
    *(Layout(nodes) for nodes in ((0, 1), (0, 0, 1, 1), (0, 0, 1))),
    *(Layout((0,) * size, nccl=True) for size in (2, 3, 4)),
    Layout((0, 0, 1, 1), nccl=True),
]
LONG = [
    Layout((0, 0)),
    Layout((0, 0, 0, 0)),
    Layout((0, 0, 1, 1)),
    Layout((0, 0, 0, 0), nccl=True),
    Layout((0, 0, 1, 1), nccl=True),
]
LONG_STEPS = 2000  # of each: 10,000 in all


@pytest.fixture(scope="module", autouse=True)
def libraries() -> tuple[Path, Path]:
    return build(LIBRARIES)


def random_steps(seat: Seat, where: str, layout: Layout, seed: int, steps: int) -> None:
    os.environ["SIMCUDA_GPU"] = str(seat.rank if layout.nccl else 0)
    device = simulator(seed * 100 + seat.rank, 150)
    config = dataclasses.replace(
        PATIENT,
        cuda_library=str(LIBRARIES / "libsimcuda.so"),
        nccl_library=str(LIBRARIES / "libsimnccl.so") if layout.nccl else "none",
        device_chunk_bytes=1 << 16,
    )
    nodes, size = list(layout.nodes), len(layout.nodes)
    one = len(set(nodes)) == 1
    comm = seat.comm(where, size, config) if one else meet(seat, where, nodes, config)
    found = comm.device_comm(device.array(np.zeros(1))).layout
    assert bool(found.nccl_library) == layout.nccl, found
    Steps(comm, device, seed, 200_000).run(steps)
    comm.close()
    counters = device.counters()
    assert counters.violations == 0, device.last_violation()
    assert counters.pageable_copies == 0
    assert counters.registered_bytes_live == 0


def run(layout: Layout, folder: Path, seed: int, steps: int, limit_s: float) -> None:
    where = meeting_point() if len(set(layout.nodes)) == 1 else str(folder)
    with Ranks(len(layout.nodes)) as ranks:
        ranks.run(random_steps, where, layout, seed, steps, limit_s=limit_s)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_random_steps(layout: Layout, tmp_path: Path) -> None:
    run(layout, tmp_path, 5, 100, 60)


@pytest.mark.chaos
@pytest.mark.parametrize("layout", LONG, ids=lambda layout: layout.name)
def test_many_random_steps(layout: Layout, tmp_path: Path) -> None:
    run(layout, tmp_path, 6, LONG_STEPS, 600)
