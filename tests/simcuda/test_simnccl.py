"""The simulated NCCL, by ranks in processes of their own.

Owns how ranks are started: the test makes the id, as one process of a job does.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simcuda_build import build
from simulated import Simulator
from simulated_nccl import NcclError, SimulatedNccl
from toolkit.processes import run_together

__all__: list[str] = []

PROGRAM = Path(__file__).with_name("nccl_ranks.py")
LIMIT_S = 30.0


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    made = Simulator(build())
    made.recover()
    made.reset_counters()
    yield made
    made.recover()


@pytest.fixture
def nccl(simulator: Simulator) -> SimulatedNccl:
    made = SimulatedNccl(simulator)
    made.reset_counters()
    return made


def run_ranks(
    nccl: SimulatedNccl, case: str, gpus: list[int], cases: dict[int, str] | None = None
) -> None:
    """Ranks, each with its GPU; `cases`: of ranks with another one. All must end well."""
    unique_id = nccl.unique_id().hex()
    commands = []
    for rank, gpu in enumerate(gpus):
        mine = (cases or {}).get(rank, case)
        words = [sys.executable, str(PROGRAM), mine, str(rank), str(len(gpus)), unique_id]
        commands.append(["env", f"SIMCUDA_GPU={gpu}", f"SIMCUDA_SEED={rank}", *words])
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "SIMCUDA_DELAY_US": "100"}
    for done in run_together(commands, env, LIMIT_S):
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_those_of_numpy(nccl: SimulatedNccl, size: int) -> None:
    everything = "groups+reductions+copies+in_place+launch_order"
    run_ranks(nccl, everything, list(range(size)))


def test_an_abort_ends_operations_that_wait_for_peers(nccl: SimulatedNccl) -> None:
    run_ranks(nccl, "abort", [0, 1])


def test_ranks_that_differ_hang_and_a_violation_says_why(nccl: SimulatedNccl) -> None:
    run_ranks(nccl, "mismatch", [0, 1])


def test_two_ranks_on_one_gpu_are_refused(nccl: SimulatedNccl) -> None:
    run_ranks(nccl, "refused5", [3, 1, 3], {1: "refused6"})


def test_ranks_that_disagree_about_their_number_are_refused(nccl: SimulatedNccl) -> None:
    unique_id = nccl.unique_id()
    command = [sys.executable, str(PROGRAM), "refused4", "1", "2", unique_id.hex()]
    other = subprocess.Popen(command, env=os.environ | {"SIMCUDA_GPU": "1"})
    try:
        with pytest.raises(NcclError) as caught:
            nccl.comm(unique_id, 0, 3)
        assert caught.value.code == 4
        assert other.wait(LIMIT_S) == 0
    finally:
        other.kill()
        other.wait()


def test_an_id_serves_once(nccl: SimulatedNccl) -> None:
    unique_id = nccl.unique_id()
    comm = nccl.comm(unique_id, 0, 1)
    with pytest.raises(NcclError, match="nobody listens") as caught:
        nccl.comm(unique_id, 0, 1)
    assert caught.value.code == 2
    nccl.destroy(comm)


def test_errors_are_injected(simulator: Simulator, nccl: SimulatedNccl) -> None:
    comm = nccl.comm(nccl.unique_id(), 0, 1)
    with simulator.array(np.arange(5.0)) as array:
        both = array.pointer, array.pointer
        simulator.fail("ncclAllReduce", 2, 6)
        nccl.all_reduce(both, 5, "float64", "sum", comm)
        with pytest.raises(NcclError) as caught:
            nccl.all_reduce(both, 5, "float64", "sum", comm)
        assert caught.value.code == 6
        nccl.all_reduce(both, 5, "float64", "sum", comm)
        nccl.finalize(comm)
        assert np.array_equal(array.numpy(), np.arange(5.0))
    assert nccl.async_error(comm) == 0
    nccl.set_async_error(comm, 6)
    assert nccl.async_error(comm) == 6
    assert nccl.counters()[:3] == (80, 2, 0)
    nccl.destroy(comm)
    assert nccl.counters().live_comms == 0


def test_a_group_with_a_bad_call_does_nothing(simulator: Simulator, nccl: SimulatedNccl) -> None:
    comm = nccl.comm(nccl.unique_id(), 0, 1)
    nccl.call("ncclGroupStart")
    with pytest.raises(NcclError):
        nccl.send(0, 5, "float64", 1, comm)
    with pytest.raises(NcclError) as caught:
        nccl.call("ncclGroupEnd")
    assert caught.value.code == 4
    with pytest.raises(NcclError):
        nccl.call("ncclGroupEnd")
    assert nccl.counters().calls == 0
    nccl.destroy(comm)
    assert simulator.counters().violations == 0


def test_host_memory_that_is_not_registered_fails_the_context(
    simulator: Simulator, nccl: SimulatedNccl
) -> None:
    comm = nccl.comm(nccl.unique_id(), 0, 1)
    array = np.ones(5)
    both = array.ctypes.data, array.ctypes.data
    with simulator.registered(array):
        nccl.all_reduce(both, 5, "float64", "sum", comm)
        simulator.synchronize()
    nccl.all_reduce(both, 5, "float64", "sum", comm)
    assert simulator.code("cuCtxSynchronize") == 700
    assert nccl.async_error(comm) == 1
    assert simulator.counters().violations == 1
    with pytest.raises(NcclError) as caught:
        nccl.all_reduce(both, 5, "float64", "sum", comm)
    assert caught.value.code == 1
    nccl.destroy(comm)


def test_every_float16_survives(simulator: Simulator, nccl: SimulatedNccl) -> None:
    comm = nccl.comm(nccl.unique_id(), 0, 1)
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits.view(np.float16)
    for dtype, numeric in (("float16", ~np.isnan(numbers)), ("bfloat16", bits & 0x7FFF <= 0x7F80)):
        with simulator.array(bits) as array:
            both = array.pointer, array.pointer
            nccl.all_reduce(both, bits.size, dtype, "max", comm)
            assert np.array_equal(array.numpy()[numeric], bits[numeric]), dtype
    nccl.destroy(comm)


def test_nothing_has_a_name_in_a_file_system(nccl: SimulatedNccl) -> None:
    folders = [Path("/dev/shm"), Path("/tmp")]
    before = [set(folder.glob("*sim*")) for folder in folders if folder.exists()]
    unique_id = nccl.unique_id()
    comm = nccl.comm(unique_id, 0, 1)
    assert [set(folder.glob("*sim*")) for folder in folders if folder.exists()] == before
    nccl.destroy(comm)


def test_questions_about_a_communicator(nccl: SimulatedNccl) -> None:
    comm = nccl.comm(nccl.unique_id(), 0, 1)
    answer = ctypes.c_int(-1)
    for function, expected in (
        ("ncclCommCount", 1),
        ("ncclCommUserRank", 0),
        ("ncclCommCuDevice", 0),
    ):
        nccl.call(function, ctypes.c_void_p(comm), ctypes.byref(answer))
        assert answer.value == expected, function
    nccl.destroy(comm)
    with pytest.raises(NcclError) as caught:
        nccl.destroy(comm)
    assert caught.value.code == 4
