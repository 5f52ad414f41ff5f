"""Buffers in a CUDA device's memory stay with MPI: the CPU can do nothing with them.

A stand-in for the driver says of ordinary memory that it is a device's, so that MPI can do the
collective. Run under mpirun, this file is the program of a rank.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd.jobs.launch import preload
from hsgd.metrics import interposer_collectives
from mpi_programs import TESTS

__all__: list[str] = []

COUNT = 5000
# Of 8 calls on the host, on a device and on the host again, one with an input there, and of 8 on
# managed memory, which the CPU can read.
TAKEN = "taken: 8 0 8 0 8"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = str(TESTS / "mpi_programs" / "libcuda.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *flags, "-o", str(library), source], check=True, timeout=60)
    return library


@pytest.mark.parametrize("np", [2, 3])
def test_what_lies_on_a_device_stays_with_mpi(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], driver: Path, np: int
) -> None:
    env = {"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60", "HSGD_MIN_BYTES": "0"}
    done = mpirun(np, Path(__file__), str(driver), env=env, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *[TAKEN] * np]


# --- the program of the ranks ---


def taken() -> int:
    return sum(each.taken_calls for each in interposer_collectives().values())


def collectives(world: Any, of: np.ndarray[Any, Any]) -> None:
    """Each kind once, with parts of one piece of memory."""
    from mpi4py import MPI

    rank, size = world.rank, world.size
    mine, out, whole = of[:COUNT], of[COUNT : 2 * COUNT], of[2 * COUNT :]
    total = size * (size + 1) / 2
    mine[:] = rank + 1
    world.Allreduce(mine, out)
    assert (out == total).all()
    world.Allreduce(MPI.IN_PLACE, mine)
    assert (mine == total).all()
    world.Bcast(out if rank else mine, root=0)
    assert (out == total).all()
    mine[:] = rank
    world.Allgather(mine, whole[: size * COUNT])
    assert (whole[: size * COUNT] == np.repeat(np.arange(size), COUNT)).all()
    world.Allgatherv(mine, [whole, [COUNT] * size, None, MPI.DOUBLE])
    assert (whole[: size * COUNT] == np.repeat(np.arange(size), COUNT)).all()
    whole[:] = 1
    world.Reduce_scatter_block(whole[: size * COUNT], out)
    assert (out == size).all()
    world.Reduce_scatter(whole[: size * COUNT], out, [COUNT] * size)
    assert (out == size).all()
    own = MPI.Op.Create(
        lambda a, b, _: np.add(np.frombuffer(a), np.frombuffer(b), out=np.frombuffer(b)),
        commute=True,
    )
    mine[:] = 2
    world.Allreduce(mine[:100], out[:100], own)
    assert (out[:100] == 2 * size).all()
    own.Free()


def main() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    host = np.zeros((2 + world.size) * COUNT)
    device = np.zeros_like(host)
    collectives(world, host)
    counts = [taken()]
    driver = ctypes.CDLL(sys.argv[1])

    def claim(memory: np.ndarray[Any, Any], *, managed: bool = False) -> None:
        address = ctypes.c_void_p(memory.ctypes.data)
        driver.stand_in_claim(address, ctypes.c_size_t(memory.nbytes), int(managed))

    claim(device)
    collectives(world, device)
    counts.append(taken())
    collectives(world, host)
    counts.append(taken())
    claim(device[:COUNT])  # an input alone
    world.Allreduce(device[:COUNT], device[COUNT : 2 * COUNT])
    counts.append(taken())
    claim(device, managed=True)
    collectives(world, device)
    counts.append(taken())
    print("taken:", *np.diff(counts, prepend=0).tolist(), flush=True)


if __name__ == "__main__":
    main()
