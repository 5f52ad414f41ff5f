"""Collectives on a simulated device, in random order on several streams, against NumPy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from device_programs import LIBRARIES, Steps, simulator
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build

__all__: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def libraries() -> tuple[Path, Path]:
    return build(LIBRARIES)


def random_steps(
    seat: Seat,
    where: str,
    nodes: list[int] | None,
    size: int,
    seed: int,
    steps: int,
    nccl: bool = False,
) -> tuple[int, ...]:
    os.environ["SIMCUDA_GPU"] = str(seat.rank if nccl else 0)
    device = simulator(seed * 100 + seat.rank, 150)
    config = dataclasses.replace(
        PATIENT,
        cuda_library=str(LIBRARIES / "libsimcuda.so"),
        nccl_library=str(LIBRARIES / "libsimnccl.so") if nccl else "none",
        device_chunk_bytes=1 << 16,
    )
    comm = seat.comm(where, size, config) if nodes is None else meet(seat, where, nodes, config)
    Steps(comm, device, seed, 200_000).run(steps)
    assert comm._device.layout.nccl_library or not nccl or size == 1, comm._device.layout
    comm.close()
    counters = device.counters()
    assert counters.violations == 0, device.last_violation()
    return counters.pageable_copies, counters.registered_bytes_live


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_steps_on_one_node(size: int) -> None:
    with Ranks(size) as ranks:
        outcomes = ranks.run(random_steps, meeting_point(), None, size, 5, 120)
    print(outcomes)


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1], [0, 0, 1]])
def test_random_steps_on_two_nodes(nodes: list[int], tmp_path: Path) -> None:
    with Ranks(len(nodes)) as ranks:
        print(ranks.run(random_steps, str(tmp_path), nodes, len(nodes), 6, 100))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_steps_over_nccl(size: int) -> None:
    with Ranks(size) as ranks:
        print(ranks.run(random_steps, meeting_point(), None, size, 7, 120, True))


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1]])
def test_random_steps_over_nccl_between_nodes(nodes: list[int], tmp_path: Path) -> None:
    with Ranks(len(nodes)) as ranks:
        print(ranks.run(random_steps, str(tmp_path), nodes, len(nodes), 8, 100, True))
