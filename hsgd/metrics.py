"""Counters of the interposer or a communicator: calls, bytes per level, seconds."""

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
    """Work of the two-level path on this rank since the process began, or between two readings.

    The seconds are of the thread that called the collective; in Horovod that is its background
    thread.
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
    """Time in collectives, with waits; on one node small ones are sampled, 1 of 16."""

    @classmethod
    def none(cls) -> Counters:
        """Return counters that are all zero."""
        return cls(0, 0, 0, 0, 0, 0.0, 0.0)

    @classmethod
    def of(cls, native: _native.Counters | _NativeCounters) -> Counters:
        """Return the core's counters; local. Users call Comm.metrics()."""
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
        """Return all counters in words, as in the interposer's report."""
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
        if not isinstance(other, Counters):
            return NotImplemented
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: Counters) -> Counters:
        if not isinstance(earlier, Counters):
            return NotImplemented
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Counters(*(now - then for now, then in pairs))


class _NativeCounters(ctypes.Structure):
    """struct hsgd_counters of hsgd/csrc/include/hsgd_core.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("calls", "payload_bytes", "intra_bytes", "inter_bytes_sent"),
            *("inter_bytes_received", "wait_ns", "total_ns"),
        )
    ]


def interposer_counters() -> Counters | None:
    """Return this rank's counters, or None without the interposer; local, from any thread."""
    library = _loaded_interposer()
    if library is None:
        return None
    native = _NativeCounters()
    library.hsgd_interposer_counters(ctypes.byref(native))
    return Counters.of(native)


@dataclass(frozen=True)
class CollectiveCounters:
    """Calls of one collective on this rank since the process began."""

    taken_calls: int
    """Calls that took the two-level path."""
    taken_bytes: int
    """Their payload: the data, all blocks together, or the input of a reduction."""
    passed_calls: int
    """Calls that passed through to MPI."""
    passed_bytes: int
    """Their payload, if the interposer looked at it."""


def interposer_collectives() -> dict[str, CollectiveCounters] | None:
    """Return the interposer's counters by collective, as "MPI_Allreduce", or None; local."""
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
    """Return the preloaded library if this process has it, by its path in hsgd or its name."""
    for abi in mpi_abi.ABIS.values():
        path = mpi_abi.path("preload", abi)
        for name in (path.name, str(path)):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None
