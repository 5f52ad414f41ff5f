"""Runs of the simulator: forms of a collective on a platform.

A run is one process; its ranks are coroutines of it, so that its time and memory grow with nodes
and bytes: `fits` says which runs are left out.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .platforms import Platform

__all__ = [
    "PEERS",
    "PROGRAM",
    "Form",
    "check_program",
    "fits",
    "hsgd_form",
    "peer_forms",
    "simulate",
]

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "simulation" / "simulate"

# Algorithms of Open MPI and MPICH as SMPI has them, each by itself at every size: the best of them
# is at least as good as what either MPI would choose. (SMPI's own choosers `ompi` and `mpich` set
# communicators up with N^2 messages first, and take minutes for 1,024 nodes.)
PEERS = {
    "allreduce": {
        "rdb": "recursive doubling (Open MPI, MPICH)",
        "rab": "Rabenseifner (Open MPI, MPICH)",
        "ompi_ring_segmented": "segmented ring (Open MPI)",
    },
    "allgather": {
        "rdb": "recursive doubling (Open MPI, MPICH)",
        "bruck": "Bruck (Open MPI, MPICH)",
        "ring": "ring (Open MPI, MPICH)",
    },
    "reduce_scatter": {
        "mpich_pair": "pairwise (MPICH)",
        "mpich_rdb": "recursive doubling (MPICH)",
        "ompi_basic_recursivehalving": "recursive halving (Open MPI)",
        "ompi_ring": "ring (Open MPI)",
    },
    "alltoall": {
        "bruck": "Bruck (Open MPI, MPICH)",
        "ring": "pairwise (Open MPI, MPICH)",
        "basic_linear": "linear (Open MPI)",
    },
    "broadcast": {
        "binomial_tree": "binomial tree (Open MPI, MPICH)",
        "scatter_rdb_allgather": "scatter and allgather (MPICH)",
        "ompi_pipeline": "chain (Open MPI)",
    },
    "barrier": {
        "ompi_bruck": "Bruck (Open MPI)",
        "ompi_recursivedoubling": "recursive doubling (Open MPI)",
    },
}
_SMPI_NAMES = {"broadcast": "bcast"}

# Bytes that all ranks pass on in one call: more takes many minutes.
_MOST_TRAFFIC = 12 << 30
# Of them together, with what the simulator holds of messages under way.
_MOST_MEMORY = 6 << 30


@dataclass(frozen=True)
class Form:
    """Who does the collective: hsgd with a radix, or one algorithm of a peer."""

    name: str
    label: str
    kind: str  # "hsgd" or "peer"
    words: tuple[str, ...]


def hsgd_form(radix: int) -> Form:
    """HSGD_WIRE_RADIX: groups of at most so many nodes."""
    return Form(f"hsgd-{radix}", f"hsgd, radix {radix}", "hsgd", ("form=hsgd", f"radix={radix}"))


def peer_forms(operation: str) -> list[Form]:
    """All of PEERS."""
    option = f"--cfg=smpi/{_SMPI_NAMES.get(operation, operation)}:"
    return [
        Form(name, label, "peer", ("form=mpi", option + name))
        for name, label in PEERS[operation].items()
    ]


def fits(nodes: int, nbytes: int) -> bool:
    """Whether a run stays within minutes and the memory that it may take."""
    return 2 * nodes * nbytes <= _MOST_TRAFFIC and nodes * min(2 * nbytes, 5 << 20) <= _MOST_MEMORY


def check_program() -> None:
    """RuntimeError, one line that says what to do, where the simulator is not built."""
    if not PROGRAM.is_file():
        where = PROGRAM.relative_to(PROGRAM.parents[2])
        raise RuntimeError(
            f"no {where}; install SimGrid (on Debian `apt install libsimgrid-dev`), then run "
            "`python setup.py simulation`"
        )


def simulate(
    platform: Platform,
    operation: str,
    form: Form,
    sizes: Sequence[int],
    *words: str,
    limit_s: float = 900.0,
) -> Iterator[dict[str, Any]]:
    """A row for each size, in order, as it is done: bytes, seconds, the most messages and bytes
    that a rank sent, and whether the values were right (None: not checked). RuntimeError where the
    simulator fails, TimeoutError where it runs for more than `limit_s`.
    """
    check_program()
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
        file.write(platform.describe())
        file.flush()
        bytes_word = "bytes=" + ",".join(map(str, sizes))
        command = [str(PROGRAM), file.name, f"operation={operation}", f"ranks={platform.nodes}"]
        command += [*form.words, bytes_word, *words, *platform.settings()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            timer = threading.Timer(limit_s, run.kill)
            timer.start()
            try:
                assert run.stdout is not None and run.stderr is not None
                for line in run.stdout:
                    row: dict[str, Any] = json.loads(line)
                    if row["right"] is False:
                        raise RuntimeError(f"wrong values: {' '.join(command)}")
                    yield row
                error = run.stderr.read()
                status = run.wait()
            finally:
                late = timer.finished.is_set()
                timer.cancel()
                run.kill()  # where the reader gave up
        if late:
            raise TimeoutError(f"the simulator ran for more than {limit_s:g} s")
        if status != 0:
            raise RuntimeError(f"the simulator ended with {status}: {error[-500:]}")
