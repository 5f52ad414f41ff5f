"""Results that hsgd makes: by the library of the array that it was given, never by NumPy."""

from __future__ import annotations

import dataclasses
import mmap
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_programs import LIBRARIES, simulator
from hsgd import Comm
from ranks import PATIENT, Ranks, Seat, meeting_point
from simcuda_build import build
from simulated import DeviceArray

__all__: list[str] = []

CALLS: dict[str, Callable[[Comm, Any], Any]] = {
    "allreduce": lambda comm, array: comm.allreduce(array),
    "allreduce_async": lambda comm, array: comm.allreduce_async(array).wait(),
    "allgather": lambda comm, array: comm.allgather(array),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array),
    "alltoall": lambda comm, array: comm.alltoall(array),
    "alltoall_async": lambda comm, array: comm.alltoall_async(array).wait(),
    "alltoall, rows": lambda comm, array: comm.alltoall(array, [3, 1])[0],
}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> tuple[Path, Path]:
    return build(LIBRARIES)


def of_cupy(seat: Seat, where: str) -> dict[str, Any]:
    """What each call gives for arrays of a stand-in for CuPy, or the error."""
    os.environ["SIMCUDA_GPU"] = "0"
    device = simulator(seat.rank, 0)

    class ndarray(DeviceArray, mmap.mmap):
        """Has the buffer protocol too, and refuses it, as CuPy's."""

        def __new__(cls, *_: object) -> Any:
            made = super().__new__(cls, -1, 1)
            mmap.mmap.close(made)
            return made

    ndarray.__module__ = "cupy"
    cupy: Any = types.ModuleType("cupy")
    cupy.empty = lambda shape, dtype: ndarray.from_numpy(device, np.zeros(shape, dtype))
    cuda = str(LIBRARIES / "libsimcuda.so")
    config = dataclasses.replace(PATIENT, cuda_library=cuda, nccl_library="none")
    found: dict[str, Any] = {}
    with Comm.local(where, seat.rank, 2, config) as comm:
        for name, call in CALLS.items():
            given = ndarray.from_numpy(device, np.arange(4.0) + seat.rank)
            sys.modules["cupy"] = cupy
            result = call(comm, given)
            assert type(result) is ndarray, name
            found[name] = result.numpy().tolist()
            del sys.modules["cupy"]
        for call in CALLS.values():
            unknown = DeviceArray.from_numpy(device, np.arange(4.0))
            with pytest.raises(TypeError, match=r"give out=, hsgd cannot make an array of Device"):
                call(comm, unknown)
    return found


def test_new_arrays_are_made_by_the_library_of_the_given_one() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(of_cupy, meeting_point())
    sums, ones = [1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 1.0, 2.0]
    assert first == {
        "allreduce": sums,
        "allreduce_async": sums,
        "allgather": [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0],
        "reduce_scatter": sums[:2],
        "alltoall": ones,
        "alltoall_async": ones,
        "alltoall, rows": [0.0, 1.0, 2.0, 1.0, 2.0, 3.0],
    }
    assert second["alltoall, rows"] == [3.0, 4.0]
    assert second["reduce_scatter"] == sums[2:]


class Mapped(np.ndarray):
    """Of NumPy, in memory that a device sees as well, as Numba's mapped and managed arrays."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__ | {"stream": 1}


def of_numba(seat: Seat, where: str) -> Any:
    with Comm.local(where, seat.rank, 2, PATIENT) as comm:
        given = (np.arange(4.0) + seat.rank).view(Mapped)
        found = {name: call(comm, given).tolist() for name, call in CALLS.items()}
        return found, given.tolist()


def test_arrays_of_numpy_that_a_device_sees_are_those_of_the_host() -> None:
    with Ranks(2) as ranks:
        (found, given), _ = ranks.run(of_numba, meeting_point())
    assert found["allreduce"] == found["allreduce_async"] == [1.0, 3.0, 5.0, 7.0]
    assert found["reduce_scatter"] == [1.0, 3.0]
    assert found["alltoall"] == [0.0, 1.0, 1.0, 2.0]
    assert given == [0.0, 1.0, 2.0, 3.0]


def shared(seat: Seat, where: str, environment: dict[str, str]) -> tuple[str, str, list[float]]:
    """How ranks that share a device exchange: NCCL's library, why not, and a sum."""
    os.environ.update(environment, SIMCUDA_GPU="0")
    device = simulator(seat.rank, 0)
    config = dataclasses.replace(
        PATIENT,
        cuda_library=str(LIBRARIES / "libsimcuda.so"),
        nccl_library=str(LIBRARIES / "libsimnccl.so"),
    )
    with Comm.local(where, seat.rank, 2, config) as comm:
        given = DeviceArray.from_numpy(device, np.arange(3.0) + seat.rank)
        layout = comm.device_comm(given).layout
        comm.allreduce(given, out=given)
        return layout.nccl_library, layout.reason, given.numpy().tolist()


SHARES = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (SHARES, ""),
        ({}, "NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1, which rank 0 has not"),
        (SHARES | {"SIMNCCL_VERSION": "22809"}, r"which NCCL allows from 2.30 on \(22809 is"),
    ],
    ids=["2.30, asked for", "not asked for", "2.28"],
)
def test_ranks_share_a_device_over_nccl_where_it_allows_it(
    environment: dict[str, str], reason: str
) -> None:
    with Ranks(2) as ranks:
        for library, why, total in ranks.run(shared, meeting_point(), environment):
            assert bool(library) == (not reason), why
            assert total == [1.0, 3.0, 5.0]
            assert re.search(reason, why), why


def test_ranks_of_which_one_does_not_share_go_through_host_memory() -> None:
    with Ranks(2) as ranks:
        where = meeting_point()
        for rank, environment in enumerate((SHARES, {})):
            ranks.start(shared, where, environment, on=[rank])
        for outcome in ranks.finish():
            assert outcome.error is None, outcome.trace
            library, why, total = outcome.value
            assert library == "" and "which rank 1 has not" in why, why
            assert total == [1.0, 3.0, 5.0]
