"""Counters of what the interposer, or a communicator, did in this process: calls, bytes per level,
seconds.

Owns the reading of the native counters and their arithmetic. Never loads a native library and never
calls MPI: where the interposer is not at work there is nothing to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from hsgd.base import mpi_abi

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["CollectiveCounters", "Counters", "interposer_collectives", "interposer_counters"]


@dataclass(frozen=True)
class Counters:
    """What the two-level path did on this rank since the process began, or between two readings.

    The seconds are of the thread that called the collective, which for Horovod is its own
    background thread.
    """

    calls: int
    """Collectives that took the two-level path."""
    payload_bytes: int
    """Sum of count * itemsize over those calls."""
    intra_bytes: int
    """Bytes that this rank read or wrote in shared memory for them."""
    inter_bytes_sent: int
    """Bytes that this rank sent to other nodes, headers included."""
    inter_bytes_received: int
    """Bytes that this rank received from other nodes, headers included."""
    wait_s: float
    """Time spent waiting for other ranks."""
    total_s: float
    """Time spent inside the collectives, waiting included. On one node the work of small ones is
    that of every sixteenth, times sixteen.
    """

    @classmethod
    def none(cls) -> Counters:
        """Nothing was done."""
        return cls(0, 0, 0, 0, 0, 0.0, 0.0)

    @classmethod
    def of(cls, comm: _native.Comm) -> Counters:
        """What the core counted for a communicator; local. Comm.metrics() is for users."""
        native = comm.counters()
        return cls(
            native.calls,
            native.payload_bytes,
            native.intra_bytes,
            native.inter_bytes_sent,
            native.inter_bytes_received,
            native.wait_ns * 1e-9,
            native.total_ns * 1e-9,
        )

    def line(self) -> str:
        """Return all of them in words, as the interposer's report has them."""
        mb = [
            f"{count * 1e-6:.3f} MB"
            for count in (
                *(self.payload_bytes, self.intra_bytes),
                *(self.inter_bytes_sent, self.inter_bytes_received),
            )
        ]
        return (
            f"{self.calls} calls with {mb[0]} took the two-level path; {mb[1]} moved inside the "
            f"node, {mb[2]} sent to and {mb[3]} received from other nodes, {self.total_s:.3f} s, "
            f"of which {self.wait_s:.3f} s waiting"
        )

    def __add__(self, other: Counters) -> Counters:
        """What was done in two places."""
        if not isinstance(other, Counters):
            return NotImplemented
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Counters) -> Counters:
        """What happened between the reading `earlier` and this one."""
        if not isinstance(earlier, Counters):
            return NotImplemented
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(now - then for now, then in pairs))


class _NativeCounters(ctypes.Structure):
    """struct hsgd_counters of hsgd/csrc/include/hsgd_core.h."""

    _fields_ = [
        ("calls", ctypes.c_uint64),
        ("payload_bytes", ctypes.c_uint64),
        ("intra_bytes", ctypes.c_uint64),
        ("inter_bytes_sent", ctypes.c_uint64),
        ("inter_bytes_received", ctypes.c_uint64),
        ("wait_ns", ctypes.c_uint64),
        ("total_ns", ctypes.c_uint64),
    ]


def interposer_counters() -> Counters | None:
    """Counters of this rank over all its communicators; None where the interposer is not loaded.

    Local, no communication. May be called while another thread is in a collective.
    """
    library = _loaded_interposer()
    if library is None:
        return None
    native = _NativeCounters()
    library.hsgd_interposer_counters(ctypes.byref(native))
    return Counters(
        native.calls,
        native.payload_bytes,
        native.intra_bytes,
        native.inter_bytes_sent,
        native.inter_bytes_received,
        native.wait_ns * 1e-9,
        native.total_ns * 1e-9,
    )


@dataclass(frozen=True)
class CollectiveCounters:
    """What became of the calls of one collective on this rank since the process began."""

    taken_calls: int
    """Calls that took the two-level path."""
    taken_bytes: int
    """Their payload: of the data, of all blocks together, or of a reduction's input."""
    passed_calls: int
    """Calls that passed through to MPI."""
    passed_bytes: int
    """Their payload, where the interposer looked at it."""


def interposer_collectives() -> dict[str, CollectiveCounters] | None:
    """By name, such as "MPI_Allreduce", what the interposer did with the calls of each collective
    that it knows; None where it is not loaded.

    Local, no communication, waits for nobody.
    """
    library = _loaded_interposer()
    if library is None:
        return None
    describe = library.hsgd_interposer_collective
    describe.restype = ctypes.c_char_p
    numbers = (ctypes.c_uint64 * 4)()
    found: dict[str, CollectiveCounters] = {}
    while name := describe(len(found), numbers):
        found[name.decode()] = CollectiveCounters(*numbers)
    return found


def _loaded_interposer() -> ctypes.CDLL | None:
    """The preloaded library if this process has it, as a file of hsgd or under that name."""
    for abi in mpi_abi.ABIS.values():
        path = mpi_abi.path("preload", abi)
        for name in (path.name, str(path)):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None
