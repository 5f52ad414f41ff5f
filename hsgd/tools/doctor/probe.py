"""Probes of MPI, mpi4py, Horovod, shared memory and a job, in child processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hsgd.base.programs import answer_of

__all__ = [
    "JOB",
    "Finding",
    "horovod_torch",
    "job",
    "libmpi_of_hsgd",
    "libmpi_of_mpi4py",
    "operators",
    "sums",
    "tuning",
]

_LIMIT_S = 120
# Of children: Python would prefer sources in the working directory to the installed hsgd.
_ELSEWHERE = os.sep
_JOB_LIMIT_S = 60
_SHOW = """
import sys
def show(value):  # MPI's texts may end with NUL bytes
    text = str(value).replace("\\0", " ").splitlines()[0]
    sys.__stdout__.write(" ".join(text.split()) + "\\n")
"""
_SHOW_LIBMPI = """
from hsgd.base import elf
paths = elf.loaded_libraries()
show(next((path for path in paths if elf.is_mpi(path.rpartition("/")[2])), "none"))
"""
_HSGD = """
import ctypes
from hsgd.jobs.launch import preload
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
_FORKED_RANKS = """
import os, secrets, time
from hsgd import Comm
path, rank = "@hsgd-probe-" + secrets.token_hex(16), 0
for other in range(1, {ranks}):
    if os.fork() == 0:
        rank = other
        break
start = time.perf_counter()
"""
_TUNING = """
with Comm.local(path, rank, {ranks}) as comm:
    place, took_ms = comm._native.topology(), 1e3 * (time.perf_counter() - start)
if rank != 0:
    os._exit(0)
store = "non-temporal" if place.nontemporal else "ordinary"
show(
    f"{{place.allreduce_bytes}} {{place.oneshot_bytes}} {{place.chunk_bytes}} {{store}} "
    f"{{took_ms:.0f}}"
)
show("none")
"""
_SUMS = """
import numpy as np
from hsgd.config import Config
with Comm.local(path, rank, {ranks}, config=Config(timeout_s=20.0)) as comm:
    total = comm.allreduce(np.full(1 << 18, rank + 1, np.float32))
right = bool((total == sum(range(1, {ranks} + 1))).all())
if rank != 0:
    os._exit(0 if right else 1)
if not right or any(os.wait()[1] for _ in range(1, {ranks})):
    sys.exit("the sum is wrong")
show(f"{{1e3 * (time.perf_counter() - start):.0f}}")
show("none")
"""
JOB = """
import sys
import numpy as np
import hsgd
comm = hsgd.Comm()
total = comm.allreduce(np.full(1 << 18, comm.rank + 1, np.float32))
if comm.size < 2:
    sys.exit("the launcher started 2 ranks, each sees itself alone: two different MPIs")
if not (total == sum(range(1, comm.size + 1))).all():
    sys.exit("the sum is wrong")
if comm.rank == 0:
    print("right", comm.size, flush=True)
"""
"""Program of a rank; rank 0 prints a line if all went well."""
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
    """Result of a child: one line, and the libmpi that it loaded; or why it failed."""

    line: str = ""
    libmpi: str = ""
    error: str = ""


def libmpi_of_hsgd(abi: str | None = None) -> Finding:
    """Find the MPI that the interposer for that ABI (or the first one) loads; blocking."""
    return _look(_HSGD.format(abi=abi))


def libmpi_of_mpi4py() -> Finding:
    """Find the MPI that mpi4py loads; local, blocking."""
    return _look(_MPI4PY)


def horovod_torch() -> Finding:
    """Check whether horovod.torch loads, and its controllers; local, blocking."""
    return _look(_HOROVOD)


def operators() -> Finding:
    """Check whether hsgd.operators load, and who implements them; local, blocking."""
    return _run(_SHOW + _OPERATORS)


def tuning(ranks: int) -> Finding:
    """Return the choices of a communicator of `ranks` ranks of this node; local, blocking.

    The line has five words: one-shot bytes of allreduces and of others, chunk bytes, kind of store,
    milliseconds of set-up.
    """
    return _run(_SHOW + (_FORKED_RANKS + _TUNING).format(ranks=ranks))


def sums(ranks: int) -> Finding:
    """Check a sum of `ranks` processes in shared memory; the line is its ms; blocking."""
    return _run(_SHOW + (_FORKED_RANKS + _SUMS).format(ranks=ranks))


def job(words: Sequence[str], added: Mapping[str, str]) -> Finding:
    """Check a command that starts ranks of JOB, with variables `added`; local, blocking."""
    try:
        environ = {**os.environ, **added}
        child = answer_of(words, _JOB_LIMIT_S, folder=_ELSEWHERE, environ=environ)
    except subprocess.TimeoutExpired:
        return Finding(error=f"no answer within {_JOB_LIMIT_S} s")
    except OSError as error:
        return Finding(error=error.strerror or str(error))
    shown = child.stdout.strip().splitlines()
    if child.returncode == 0 and shown and shown[-1].startswith("right "):
        return Finding(line=shown[-1])
    return Finding(error=_reason(child.stderr + child.stdout, child.returncode))


def _reason(text: str, code: int) -> str:
    """Return the best line: an error of Python or of the launcher, else the first one."""
    found = [line.strip(" -*=") for line in text.splitlines() if line.strip(" -*=")]
    raised = [line for line in found if re.match(r"[\w.]+(Error|Exception)\b", line)]
    telling = (line for line in found if "run as root" in line or " error" in line)
    return raised[-1] if raised else next(telling, found[0] if found else f"exit code {code}")


def _look(code: str) -> Finding:
    return _run(_SHOW + code + _SHOW_LIBMPI)


def _run(code: str) -> Finding:
    environ = {name: value for name, value in os.environ.items() if name != "HOROVOD_PLUGIN"}
    try:
        words = [sys.executable, "-c", code]
        child = answer_of(words, _LIMIT_S, folder=_ELSEWHERE, environ=environ)
    except subprocess.TimeoutExpired:
        return Finding(error=f"no answer within {_LIMIT_S} s")
    shown = child.stdout.splitlines()
    if child.returncode == 0 and len(shown) >= 2:
        return Finding(line=shown[-2], libmpi=shown[-1])
    errors = child.stderr.strip().splitlines()
    return Finding(error=errors[-1] if errors else f"exit code {child.returncode}")
