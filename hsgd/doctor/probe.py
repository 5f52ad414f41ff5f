"""Looks at MPI, mpi4py and Horovod from child processes, because a broken one may crash who loads
it.

Owns the code that the children run and the reading of what they show. Never loads MPI into this
process, and never starts MPI: MPI_Init is not called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["Finding", "horovod_torch", "libmpi_of_hsgd", "libmpi_of_mpi4py", "operators", "tuning"]

_LIMIT_S = 120
_SHOW = """
import sys
def show(value): sys.__stdout__.write(" ".join(str(value).splitlines()[0].split()) + "\\n")
"""
_SHOW_LIBMPI = """
from hsgd.launch import elf
paths = elf.loaded_libraries()
show(next((path for path in paths if elf.is_mpi(path.rpartition("/")[2])), "none"))
"""
_HSGD = """
import ctypes
from hsgd.launch import preload
text, size = ctypes.create_string_buffer(8192), ctypes.c_int()
ctypes.CDLL(str(preload.engine({abi!r}))).MPI_Get_library_version(text, ctypes.byref(size))
show(text.value.decode(errors="replace"))
"""
_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
show(MPI.Get_library_version())
"""
_TUNING = """
import os, secrets, time
from hsgd import Comm
path, rank = "@hsgd-info-" + secrets.token_hex(16), 0
for other in range(1, {ranks}):
    if os.fork() == 0:
        rank = other
        break
start = time.perf_counter()
with Comm.local(path, rank, {ranks}) as comm:
    place, took_ms = comm._native.topology(), 1e3 * (time.perf_counter() - start)
if rank != 0:
    os._exit(0)
store = "non-temporal" if place.nontemporal else "ordinary"
show(f"{{place.oneshot_bytes}} {{place.chunk_bytes}} {{store}} {{took_ms:.0f}}")
show("none")
"""
_HOROVOD = """
import horovod.torch as hvd
show(" and ".join(n for n, b in (("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built())) if b))
"""
_OPERATORS = """
from hsgd.operators import kernels, schemas
schemas.define()
reason = kernels.why_in_python()
show(f"through Python: {reason}" if reason else "without Python")
show("none")
"""


@dataclass(frozen=True)
class Finding:
    """What a child saw: one line about the thing, the libmpi it loaded; or why it failed."""

    line: str = ""
    libmpi: str = ""
    error: str = ""


def libmpi_of_hsgd(abi: str | None = None) -> Finding:
    """The MPI that the engine of the interposer for that ABI, or the first one, loads; local,
    blocking."""
    return _look(_HSGD.format(abi=abi))


def libmpi_of_mpi4py() -> Finding:
    """The MPI that mpi4py loads; local, blocking."""
    return _look(_MPI4PY)


def horovod_torch() -> Finding:
    """Whether horovod.torch loads, and for which controllers it was built; local, blocking."""
    return _look(_HOROVOD)


def operators() -> Finding:
    """Whether hsgd.operators load, and who implements them; local, blocking."""
    return _run(_SHOW + _OPERATORS)


def tuning(ranks: int) -> Finding:
    """What a communicator of `ranks` ranks of this node measures and chooses; local, blocking.

    The line has four words: one-shot bytes, chunk bytes, kind of store, milliseconds of set-up.
    """
    return _run(_SHOW + _TUNING.format(ranks=ranks))


def _look(code: str) -> Finding:
    return _run(_SHOW + code + _SHOW_LIBMPI)


def _run(code: str) -> Finding:
    environ = {name: value for name, value in os.environ.items() if name != "HOROVOD_PLUGIN"}
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(error=f"no answer within {_LIMIT_S} s")
    shown = child.stdout.splitlines()
    if child.returncode == 0 and len(shown) >= 2:
        return Finding(line=shown[-2], libmpi=shown[-1])
    errors = child.stderr.strip().splitlines()
    return Finding(error=errors[-1] if errors else f"exit code {child.returncode}")
