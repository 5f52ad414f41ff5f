"""What a rank learned of a communicator, and the communicators of the same ranks that come later.

Run under mpirun, this file is the program of a rank.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsgd.base import mpi_abi

__all__: list[str] = []

pytestmark = pytest.mark.long

RANKS = 4
ORDERS = tuple(itertools.permutations(range(RANKS)))  # the ranks of each are learned of apart
COMMUNICATORS = 3 * len(ORDERS)


def test_ranks_that_learned_in_different_orders_make_communicators(
    mpirun: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Two threads make one each at once, with switch points of their own, so that on each rank
    another one may end first; then all ranks use what they learned.
    """
    done = mpirun(RANKS, Path(__file__), timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stays with MPI" not in done.stderr, done.stderr
    assert done.stdout == f"{COMMUNICATORS} of {COMMUNICATORS} communicators\n"


# --- the program of the ranks ---


def options_with(library: ctypes.CDLL, env: dict[str, str]) -> Any:
    os.environ.update(env)
    options = ctypes.create_string_buffer(4096)  # more than they take
    assert library.hsgd_options_from_env(options, None) == 0
    for name in env:
        del os.environ[name]
    return options


def main() -> None:
    from mpi4py import MPI

    abi = mpi_abi.of_version(MPI.Get_library_version())
    library = ctypes.CDLL(str(mpi_abi.path("mpi", abi)))
    own = [{"HSGD_ONESHOT_BYTES": number} for number in ("4096", "8192")]
    options = [options_with(library, env) for env in (*own, {})]
    world = MPI.COMM_WORLD

    def make(comm: MPI.Comm, index: int) -> None:
        core, error = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        status = library.hsgd_mpi_comm_cached(
            ctypes.c_void_p(MPI._addressof(comm)),
            options[index],
            ctypes.c_uint64(1),
            ctypes.c_uint64(0),
            ctypes.byref(core),
            error,
        )
        made[index] += status == 0 and core.value is not None

    made = [0, 0, 0]
    for order in ORDERS:
        ordered = world.Split(0, order[world.rank])
        comms = [ordered.Dup() for _ in range(3)]
        threads = [threading.Thread(target=make, args=(comms[i], i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        make(comms[2], 2)
        for comm in (*comms, ordered):
            comm.Free()
    least = world.allreduce(sum(made), MPI.MIN)
    if world.rank == 0:
        print(f"{least} of {COMMUNICATORS} communicators")


if __name__ == "__main__":
    main()
