"""The simulated NCCL for tests: communicators and operations of libsimnccl.so, by ctypes.

Owns the calls and their types. What a test asks to go wrong, it asks of the Simulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from simulated import Simulator

__all__ = ["DTYPES", "OPS", "NcclCounters", "NcclError", "SimulatedNccl"]

DTYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
)
OPS = ("sum", "prod", "max", "min", "avg")
ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * ID_BYTES)]


class _Counters(ctypes.Structure):
    _fields_ = [
        *[(name, c_uint64) for name in ("bytes_sent", "calls", "aborted")],
        ("live_comms", c_int),
    ]


_BUFFERS: list[Any] = [c_void_p, c_void_p, c_size_t, c_int]  # send, receive, count, dtype
_TARGET: list[Any] = [c_void_p, c_void_p]  # communicator, stream
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetUniqueId": [c_void_p],
    "ncclCommInitRank": [c_void_p, c_int, _UniqueId, c_int],
    "ncclCommFinalize": [c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "ncclCommGetAsyncError": [c_void_p, c_void_p],
    "ncclAllReduce": [*_BUFFERS, c_int, *_TARGET],
    "ncclReduceScatter": [*_BUFFERS, c_int, *_TARGET],
    "ncclAllGather": [*_BUFFERS, *_TARGET],
    "ncclBroadcast": [*_BUFFERS, c_int, *_TARGET],
    "ncclReduce": [*_BUFFERS, c_int, c_int, *_TARGET],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, *_TARGET],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, *_TARGET],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class NcclCounters(NamedTuple):
    """What the process did so far; see nccl/nccl_types.hpp."""

    bytes_sent: int
    calls: int
    aborted: int
    live_comms: int


class NcclError(RuntimeError):
    """A call of NCCL failed. `code`: its ncclResult_t."""

    def __init__(self, function: str, code: int, why: str) -> None:
        super().__init__(f"{function}: {why} ({code})")
        self.code = code


class SimulatedNccl:
    """NCCL in this process. Buffers are addresses, counts are of elements, dtypes are names."""

    def __init__(self, simulator: Simulator) -> None:
        self.library = simulator.nccl
        for name, types in _SIGNATURES.items():
            getattr(self.library, name).argtypes = types
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.library.ncclGetLastError.argtypes = [c_void_p]

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            why: bytes = self.library.ncclGetLastError(None)
            raise NcclError(function, code, why.decode())

    def unique_id(self) -> bytes:
        """Starts a meeting in this process, which must live until all ranks are there."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made.internal)

    def comm(self, unique_id: bytes, rank: int, size: int) -> int:
        """Collective; blocks until all ranks have come."""
        answer = c_uint64()
        identity = _UniqueId.from_buffer_copy(unique_id)
        self.call("ncclCommInitRank", ctypes.byref(answer), size, identity, rank)
        return answer.value

    def finalize(self, comm: int) -> None:
        self.call("ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """Waits for the communicator's operations."""
        self.call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """Ends operations that wait for peers; the handle is gone then."""
        self.call("ncclCommAbort", comm)

    def async_error(self, comm: int) -> int:
        answer = c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(answer))
        return answer.value

    def all_reduce(
        self, buffers: tuple[int, int], count: int, dtype: str, op: str, comm: int, stream: int = 0
    ) -> None:
        """`buffers`, of all operations: where to send from and where to receive."""
        kind = DTYPES.index(dtype)
        self.call("ncclAllReduce", *buffers, count, kind, OPS.index(op), comm, stream)

    def reduce_scatter(
        self, buffers: tuple[int, int], count: int, dtype: str, op: str, comm: int, stream: int = 0
    ) -> None:
        kind = DTYPES.index(dtype)
        self.call("ncclReduceScatter", *buffers, count, kind, OPS.index(op), comm, stream)

    def all_gather(
        self, buffers: tuple[int, int], count: int, dtype: str, comm: int, stream: int = 0
    ) -> None:
        self.call("ncclAllGather", *buffers, count, DTYPES.index(dtype), comm, stream)

    def broadcast(
        self,
        buffers: tuple[int, int],
        count: int,
        dtype: str,
        root: int,
        comm: int,
        stream: int = 0,
    ) -> None:
        self.call("ncclBroadcast", *buffers, count, DTYPES.index(dtype), root, comm, stream)

    def reduce(
        self,
        buffers: tuple[int, int],
        count: int,
        dtype: str,
        op: str,
        root: int,
        comm: int,
        stream: int = 0,
    ) -> None:
        kind = DTYPES.index(dtype)
        self.call("ncclReduce", *buffers, count, kind, OPS.index(op), root, comm, stream)

    def send(
        self, buffer: int, count: int, dtype: str, peer: int, comm: int, stream: int = 0
    ) -> None:
        self.call("ncclSend", buffer, count, DTYPES.index(dtype), peer, comm, stream)

    def receive(
        self, buffer: int, count: int, dtype: str, peer: int, comm: int, stream: int = 0
    ) -> None:
        self.call("ncclRecv", buffer, count, DTYPES.index(dtype), peer, comm, stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls inside are one operation."""
        self.call("ncclGroupStart")
        try:
            yield
        finally:
            self.call("ncclGroupEnd")

    def counters(self) -> NcclCounters:
        found = _Counters()
        self.library.simnccl_get_counters(ctypes.byref(found))
        return NcclCounters(found.bytes_sent, found.calls, found.aborted, found.live_comms)

    def reset_counters(self) -> None:
        self.library.simnccl_reset_counters()

    def set_async_error(self, comm: int, code: int) -> None:
        """What ncclCommGetAsyncError says from now on."""
        self.call("simnccl_set_async_error", c_void_p(comm), code)
