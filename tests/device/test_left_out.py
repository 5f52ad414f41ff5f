"""Variants of hsgd that leave out a wait must give wrong results on the simulated device.

Owns the proof that the tests of this folder see them. A variant is made by the driver, which takes
a call for nothing: to the program that is as if it had not been written.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from device_programs import LIBRARIES, Case, Steps, simulator
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build

__all__: list[str] = []

ROUNDS = 30
WAIT, VALUE, WRITE = "cuStreamWaitEvent", "cuStreamWaitValue32", "cuStreamWriteValue32"
Gaps = list[tuple[str, int, int]]  # function, every so many calls, which of them


@pytest.fixture(scope="module", autouse=True)
def libraries() -> tuple[Path, Path]:
    return build(LIBRARIES)


def rounds(
    seat: Seat, where: str, nodes: list[int] | None, rows: int, nccl: bool, gaps: Gaps
) -> str:
    """What is wrong after some allreduces of int64 rows, on one stream; "" where nothing is."""
    os.environ["SIMCUDA_GPU"] = str(seat.rank if nccl else 0)
    device = simulator(3 + seat.rank, 1000)
    config = dataclasses.replace(
        PATIENT,
        cuda_library=str(LIBRARIES / "libsimcuda.so"),
        nccl_library=str(LIBRARIES / "libsimnccl.so") if nccl else "none",
        device_chunk_bytes=1 << 18,
    )
    comm = seat.comm(where, 2, config) if nodes is None else meet(seat, where, nodes, config)
    steps = Steps(comm, device, 0, 1)
    steps.one(Case(0, "allreduce", "int64", rows, 1, False, False, 0, "sum"))
    steps.check()  # what is made by the first call is there
    for gap in gaps:
        device.leave_out(*gap)
    try:
        for step in range(ROUNDS):
            steps.one(Case(step, "allreduce", "int64", rows, 1, step % 2 == 0, False, 0, "sum"))
        steps.check()
    except AssertionError as error:
        return str(error)
    finally:
        device.leave_out("", 0, 0)
        device.synchronize()
        comm.barrier()
        comm.close()
    return ""


def wrong(folder: Path, nodes: list[int] | None, rows: int, nccl: bool, gaps: Gaps) -> list[str]:
    """What is wrong on each rank."""
    size = len(nodes or "12")
    where = meeting_point() if nodes is None else str(folder)
    with Ranks(size) as ranks:
        found: list[str] = ranks.run(rounds, where, nodes, rows, nccl, gaps)
    return found


# One step: its waits are those for the input, for the slot, and, by the user's stream, for the end.
ONE_STEP = {
    "input": [(WAIT, 3, 0)],
    "end": [(WAIT, 3, 2)],
    "result": [(VALUE, 1, 0)],
    "copy down": [(WRITE, 1, 0)],
}


@pytest.mark.parametrize("gaps", [[], *ONE_STEP.values()], ids=["nothing", *ONE_STEP])
def test_through_host_memory(gaps: Gaps, tmp_path: Path) -> None:
    found = wrong(tmp_path, None, 20_000, False, gaps)
    assert all(found) == bool(gaps) if gaps else not any(found), found


@pytest.mark.parametrize("left_out", [False, True])
def test_slots_are_used_again_when_they_are_free(left_out: bool, tmp_path: Path) -> None:
    """Eight steps in four slots: the waits of a call are 1 for the input, 8 for slots, 1 for the
    end.
    """
    gaps: Gaps = [(WAIT, 10, at) for at in range(1, 9)] if left_out else []
    found = wrong(tmp_path, None, 8 << 15, False, gaps)
    assert any(found) == left_out, found


NCCL_ALONE = {"input": [(WAIT, 2, 0)], "end": [(WAIT, 2, 1)]}


@pytest.mark.parametrize("gaps", [[], *NCCL_ALONE.values()], ids=["nothing", *NCCL_ALONE])
def test_over_nccl(gaps: Gaps, tmp_path: Path) -> None:
    found = wrong(tmp_path, None, 20_000, True, gaps)
    assert any(found) == bool(gaps), found


# One chunk: NCCL's stream waits for the input; copies down for the sum in the node, and for the
# slot; NCCL's stream for the copy up; the user's for the end.
BETWEEN_NODES = {
    "input": [(WAIT, 5, 0)],
    "sum in the node": [(WAIT, 5, 1)],
    "copy up": [(WAIT, 5, 3)],
    "end": [(WAIT, 5, 4)],
    "result": [(VALUE, 1, 0)],
}


@pytest.mark.parametrize("gaps", [[], *BETWEEN_NODES.values()], ids=["nothing", *BETWEEN_NODES])
def test_over_nccl_between_nodes(gaps: Gaps, tmp_path: Path) -> None:
    found = wrong(tmp_path, [0, 0, 1, 1], 20_000, True, gaps)
    assert any(found) == bool(gaps), found
