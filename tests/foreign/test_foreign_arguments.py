"""Arguments that no program should give: each is one clear line of a built-in class, at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm, NotifiedWindow, ParameterBox, SharedMemoryError, SignatureMismatch
from hsgd.errors import LaunchError
from hsgd.jobs.launch.mpirun import Job, Launcher, command_line, parse_hosts
from ranks import PATIENT, Ranks, Seat, meeting_point

__all__: list[str] = []

ONE = np.ones(1, np.float32)
LIMIT_S = 60.0

REFUSED: dict[str, tuple[type[Exception], Callable[[Comm], Any]]] = {
    "a product that wraps to 4": (ValueError, lambda c: c.empty((2**62 + 1, 4))),
    "a product that wraps to 2**32": (ValueError, lambda c: c.empty((2**32 + 1, 2**32))),
    "an extent beyond 64 bits": (ValueError, lambda c: c.empty((2**63, 2))),
    "an extent beyond 64 bits of an empty array": (ValueError, lambda c: c.empty((2**64, 0))),
    "bytes that wrap": (ValueError, lambda c: c.shared(2**61 + 1, "float64")),
    "more than there is": (SharedMemoryError, lambda c: c.empty(2**50, "uint8")),
    "more than there is, shared": (SharedMemoryError, lambda c: c.shared(2**50, "uint8")),
    "a negative extent": (ValueError, lambda c: c.empty((3, -1))),
    "half an element": (TypeError, lambda c: c.empty(2.5)),
    "a word for a shape": (TypeError, lambda c: c.empty("ab")),
    "a number as name": (TypeError, lambda c: c.empty(1, name=5)),  # type: ignore[arg-type]
    "NUL in a name": (ValueError, lambda c: c.empty(1, name="a\0b")),
    "a number as name of a collective": (
        TypeError,
        lambda c: c.allreduce(ONE, name=5),  # type: ignore[arg-type]
    ),
    "NUL in the name of a collective": (ValueError, lambda c: c.allreduce(ONE, name="a\0b")),
    "NUL in the name of an open one": (ValueError, lambda c: c.allreduce_async(ONE, name="\0")),
    "a root beyond C's int": (ValueError, lambda c: c.broadcast(ONE, root=2**40)),
    "a root that is no number": (TypeError, lambda c: c.broadcast(ONE, root="0")),  # type: ignore[arg-type]
    "a color that is no number": (TypeError, lambda c: c.split(1.5)),  # type: ignore[arg-type]
    "a count beyond 64 bits": (ValueError, lambda c: c.reduce_scatter(ONE, counts=[2**64])),
    "half a row": (TypeError, lambda c: c.alltoall(ONE, [0.5])),  # type: ignore[list-item]
    "records beyond 64 bits": (ValueError, lambda c: c.keep_records(2**70)),
    "a segment that wraps": (ValueError, lambda c: NotifiedWindow(c, 2**64 - 1, 1)),
    "a segment beyond 64 bits": (ValueError, lambda c: NotifiedWindow(c, 2**70, 1)),
    "a segment nobody can address": (ValueError, lambda c: NotifiedWindow(c, 2**62, 1)),
    "slots beyond 32 bits": (ValueError, lambda c: NotifiedWindow(c, 1, 2**32)),
    "values of a box that wrap": (ValueError, lambda c: ParameterBox.create("k", count=2**62 + 1)),
    "values of a box beyond 64 bits": (ValueError, lambda c: ParameterBox.create("k", count=2**70)),
    "a rank beyond C's int": (ValueError, lambda c: Comm.local("@hsgd-test-x", 2**40, 2)),
    "NUL in a path": (ValueError, lambda c: Comm.local("@a\0b", 0, 1)),
}


@pytest.fixture(scope="module")
def alone() -> Comm:
    return Comm.local(meeting_point(), 0, 1, PATIENT)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_one_clear_line(alone: Comm, what: str) -> None:
    kind, call = REFUSED[what]
    with pytest.raises(kind) as caught:
        call(alone)
    line = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in line and "incompatible function arguments" not in line
    assert len(line) > 15
    assert alone.allreduce(ONE) == ONE  # it goes on


def test_whole_numbers_of_other_classes_are_numbers(alone: Comm) -> None:
    assert alone.empty(np.int64(10)).shape == (10,)
    assert alone.empty(np.array([2, 3])).shape == (2, 3)
    assert alone.empty((np.int32(4), True)).shape == (4, 1)
    assert alone.empty(()).shape == ()
    assert alone.empty((0, 2**40)).shape == (0, 2**40)
    assert alone.broadcast(ONE, root=np.int64(0)) is ONE
    part = alone.split(np.int64(0), np.int64(3))  # type: ignore[arg-type]
    assert part is not None
    part.close()


def do_differ(seat: Seat, path: str) -> str:
    comm = seat.comm(path, 2)
    try:
        (comm.shared if seat.rank == 0 else comm.empty)(100)
    except SignatureMismatch as error:
        return str(error)
    return "no error"


@pytest.mark.long
def test_shared_against_empty_reads_differently() -> None:
    with Ranks(2) as ranks:
        lines = ranks.run(do_differ, meeting_point())
    for line in lines:
        assert "rank 0 called shared of 100 float32" in line
        assert "rank 1 called empty of 100 float32" in line


@pytest.mark.parametrize("ranks", ["99999999999", "9" * 5000, "1048577", "5000"])
def test_ranks_that_no_machine_has_are_refused(ranks: str) -> None:
    command = [Path(sys.executable).with_name("hsgd"), "run", "-np", ranks, "--dry-run", "true"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=None
    )
    assert done.returncode != 0 and done.stdout == ""
    assert "ranks" in done.stderr and "give" in done.stderr
    assert "Traceback" not in done.stderr


def test_slots_of_hosts_do_not_hide_too_many_ranks() -> None:
    launcher = Launcher("/x/mpirun", "Open MPI", "5.0.11")
    hosts = parse_hosts("a:99999,b:99999", 10_000)
    with pytest.raises(LaunchError, match="10000 ranks on one host"):
        command_line(launcher, Job(("true",), 10_000, 2, hosts), {})
