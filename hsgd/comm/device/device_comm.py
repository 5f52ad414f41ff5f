"""DeviceComm: the collectives of a communicator on arrays of one CUDA device.

No call waits for the device. A collective is ordered after the work queued before on the stream of
its array; work queued on that stream after wait() is ordered after the result. So a program reads
results as after any operation of its stream.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hsgd import _native
from hsgd.base.rows import even_rows
from hsgd.comm.device.device_arrays import DeviceArray, empty_like
from hsgd.comm.device.device_layout import DeviceLayout

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm
    from hsgd.config import Config

__all__ = ["DeviceComm", "DeviceRequest"]

_left_behind: list[Any] = []


class DeviceRequest:
    """A started collective on device memory."""

    __slots__ = ("_arrays", "_comm", "_result", "_work")

    def __init__(
        self, comm: DeviceComm, work: _native.DeviceWork, arrays: Sequence[DeviceArray], result: Any
    ) -> None:
        self._comm, self._work, self._result = comm, work, result
        self._arrays = arrays

    def result(self) -> Any:
        """Return `out` or the new array; local. Use its values only after wait()."""
        return self._result

    def done(self) -> bool:
        """Return whether the device has finished; local, never blocks."""
        return self._work.done()

    def wait(self, timeout_s: float = -1.0) -> bool:
        """Order later work of the array's stream after the result; local. Raises known errors."""
        self._comm.order(self._work, self._arrays)
        return True


class DeviceComm:
    """Collectives on arrays of device `ordinal`, over communicators of its own.

    The constructor is collective over `comm` and blocking. It raises HsgdError without a driver,
    and between nodes if MPI was initialized with less than MPI_THREAD_MULTIPLE.
    """

    def __init__(self, comm: Comm, config: Config, ordinal: int) -> None:
        self._comm = weakref.proxy(comm)
        self.ordinal = ordinal
        self._library = config.cuda_library
        self.layout = DeviceLayout.agreed(comm, config, ordinal)
        layout = self.layout
        with contextlib.ExitStack() as undo:
            names = comm.rank_names
            hosts = [comm.split_named(0, comm.rank, names)]
            if layout.nccl_library and comm.cross_size > 1:
                names = [names[rank] for rank in _with_same_local_rank(comm)]
                hosts.append(comm.split_named(comm.local_rank, comm.rank, names))
            self._hosts = [host for host in hosts if host is not None]  # all ranks pass a color
            for host in self._hosts:
                host.belongs_to_another()
                undo.callback(host.close)
            addresses = [host.shared_address() for host in self._hosts]
            self._native = _native.DeviceComm(
                comm=addresses[0],
                between=addresses[1] if len(addresses) > 1 else 0,
                cuda_library=config.cuda_library,
                nccl_library=layout.nccl_library,
                nccl_id=layout.nccl_id,
                ordinal=ordinal,
                chunk_bytes=config.device_chunk_bytes,
                slots=config.slots,
            )
            undo.pop_all()
        self._lock = threading.Lock()
        # By id(): works not yet waited for on the stream of their arrays, and these arrays.
        self._open: dict[int, tuple[_native.DeviceWork, Sequence[DeviceArray]]] = {}
        self._lost: list[Sequence[DeviceArray]] = []  # of calls that failed while they were queued

    @classmethod
    def beside(cls, comm: Comm, config: Config, array: Any) -> DeviceComm:
        return cls(comm, config, DeviceArray.of(array, "array", config.cuda_library).ordinal)

    def close(self) -> None:
        """Free everything; local, blocks until started collectives end. May be called again."""
        is_done = self._native.close()
        for host in self._hosts:
            host.close()
        if not is_done:  # the device hangs, and may use their arrays forever
            _left_behind.extend([*self._open.values(), *self._lost])
        self._open.clear()
        self._lost.clear()

    def leave(self) -> None:
        """Leave, as Comm.leave(); local. Pending collectives fail on the other ranks."""
        for host in self._hosts:
            host.leave()

    def abort(self) -> None:
        self._native.abort()
        for host in self._hosts:
            host.abort()

    def inter_bytes(self) -> int:
        """Return the bytes that this rank sent to other nodes; local."""
        return sum(host.metrics().inter_bytes_sent for host in self._hosts)

    def check(self) -> None:
        """Raise the error of a failed collective, if any; local, never blocks."""
        self._native.check()

    def order(self, work: _native.DeviceWork, arrays: Sequence[DeviceArray]) -> None:
        """Order streams after `work`; see DeviceRequest.wait."""
        self._native.check()
        later = [_current_stream(array) for array in arrays]
        for stream in dict.fromkeys(later):
            work.order(stream)
        if later == [array.stream for array in arrays]:  # the streams that the allocators know
            self._forget(work)

    def _forget(self, work: _native.DeviceWork) -> None:
        with self._lock:
            self._open.pop(id(work), None)

    def _sweep(self) -> None:
        """Forget up to two finished works: each call adds one."""
        with self._lock:
            oldest = list(itertools.islice(self._open.items(), 2))
        for key, (work, _) in oldest:
            if work.done():
                with self._lock:
                    self._open.pop(key, None)

    def _started(
        self,
        start: Callable[..., _native.DeviceWork],
        arrays: Sequence[DeviceArray],
        result: Any,
        name: str | None,
    ) -> DeviceRequest:
        self._native.check()
        try:
            work = start(streams=list({array.stream: None for array in arrays}), name=name)
            with self._lock:
                self._open[id(work)] = work, arrays
        except (ValueError, TypeError):  # nothing was queued
            raise
        except BaseException:
            self._lost.append(arrays)  # work queued before the failure may still use them
            raise
        self._sweep()
        return DeviceRequest(self, work, arrays, result)

    def _pair(self, what: str, source: DeviceArray, target: DeviceArray) -> None:
        for array in (source, target):
            if array.ordinal != self.ordinal:
                raise ValueError(
                    f"{what}: the array is on cuda:{array.ordinal}, but this communicator's first "
                    f"one was on cuda:{self.ordinal}; use one device per rank and communicator"
                )
        if source.dtype != target.dtype:
            raise ValueError(
                f"{what}: out has dtype {target.dtype}, the input {source.dtype}; give one dtype"
            )

    def allreduce(self, array: Any, op: int, out: Any, name: str | None) -> DeviceRequest:
        """Start an allreduce; `op` is its code."""
        source = DeviceArray.of(array, "allreduce", self._library)
        result = empty_like(array, source.shape, "allreduce") if out is None else out
        target = (
            source if result is array else DeviceArray.of(result, "allreduce, out", self._library)
        )
        self._pair("allreduce", source, target)
        if source.shape != target.shape:
            raise ValueError(
                "allreduce: out has another shape or dtype than the input; pass one like it"
            )
        start = functools.partial(self._native.allreduce, source.memory, target.memory, op)
        return self._started(start, (source, target), result, name)

    def broadcast(self, array: Any, root: int, name: str | None) -> DeviceRequest:
        """Start a broadcast in place."""
        data = DeviceArray.of(array, "broadcast", self._library)
        self._pair("broadcast", data, data)
        if not 0 <= root < self._comm.size:
            raise ValueError(f"broadcast: root {root} of {self._comm.size} ranks")
        start = functools.partial(self._native.broadcast, data.memory, root)
        return self._started(start, (data,), array, name)

    def reduce_scatter(
        self, array: Any, op: int, out: Any, rows: Sequence[int] | None, name: str | None
    ) -> DeviceRequest:
        """Start a reduce_scatter with each rank's `rows`; None splits as evenly as possible."""
        what = "reduce_scatter"
        source = DeviceArray.of(array, what, self._library)
        each = self._rows(what, source, rows)
        result, target = self._target(what, array, source, each[self._comm.rank], out)
        counts = [count * source.row_elements for count in each]
        start = functools.partial(
            self._native.reduce_scatter, source.memory, target.memory, op, counts
        )
        return self._started(start, (source, target), result, name)

    def allgather(
        self, array: Any, out: Any, name: str | None, rows: Sequence[int] | None = None
    ) -> DeviceRequest:
        """Start an allgather with each rank's `rows`; None exchanges them first, blocking."""
        what = "allgather"
        source = DeviceArray.of(array, what, self._library)
        each = self._told(source.rows, what) if rows is None else list(rows)
        result, target = self._target(what, array, source, sum(each), out)
        counts = [count * source.row_elements for count in each]
        start = functools.partial(self._native.allgather, source.memory, target.memory, counts)
        return self._started(start, (source, target), result, name)

    def alltoall(
        self, array: Any, send_rows: Sequence[int] | None, out: Any, name: str | None
    ) -> tuple[DeviceRequest, list[int]]:
        """Start an alltoall; exchange `send_rows` first, blocking; return received rows, too."""
        import numpy as np

        what = "alltoall"
        source = DeviceArray.of(array, what, self._library)
        sent = self._rows(what, source, send_rows)
        if send_rows is None:
            if len(set(sent)) > 1:
                raise ValueError(
                    f"alltoall: {source.rows} rows cannot be split evenly over {len(sent)} ranks; "
                    "give send_counts"
                )
            received, longest = sent, sent[0]
        else:
            table = self._comm.allgather(np.array([sent], np.int64), name="rows of an alltoall")
            received, longest = table[:, self._comm.rank].tolist(), int(table.max())
        result, target = self._target(what, array, source, sum(received), out)
        each = source.row_elements
        start = functools.partial(
            self._native.alltoall,
            source.memory,
            target.memory,
            [count * each for count in sent],
            [count * each for count in received],
            longest * each,
            send_rows is None,
        )
        return self._started(start, (source, target), result, name), received

    def _told(self, mine: int, what: str) -> list[int]:
        import numpy as np

        told = self._comm.allgather(np.array([mine], np.int64), name=f"rows of an {what}")
        return [int(count) for count in told]

    def _rows(self, what: str, source: DeviceArray, rows: Sequence[int] | None) -> list[int]:
        size = self._comm.size
        if not source.shape:
            raise ValueError(f"{what}: a 0-d array has no rows to split; pass one with rows")
        if rows is None:
            return even_rows(source.rows, size)
        if len(rows) != size or sum(rows) != source.rows:
            raise ValueError(
                f"{what}: {len(rows)} counts for {sum(rows)} rows, but there are {size} ranks and "
                f"{source.rows} rows; give one count per rank, which sum to the number of rows"
            )
        return list(rows)

    def _target(
        self, what: str, array: Any, source: DeviceArray, rows: int, out: Any
    ) -> tuple[Any, DeviceArray]:
        """Return `out`, or a new array of these rows, and what it is; ValueError if it misfits."""
        result = out
        if out is None:
            result = empty_like(array, (rows, *source.shape[1:]), what)
        target = DeviceArray.of(result, f"{what}, out", self._library)
        self._pair(what, source, target)
        if target.row_elements != source.row_elements:
            raise ValueError(
                f"{what}: out must have the shape of the input but for the number of rows"
            )
        if target.rows != rows:
            raise ValueError(
                f"{what}: out has {target.rows} rows, but the result has {rows}; pass one of that "
                "size, or None"
            )
        return result, target


def _with_same_local_rank(comm: Comm) -> list[int]:
    """Return the ranks that have the local rank of this one, in order."""
    seen: Counter[int] = Counter()
    ranks = []
    for rank, node in enumerate(comm.nodes):
        if seen[node] == comm.local_rank:
            ranks.append(rank)
        seen[node] += 1
    return ranks


def _current_stream(array: DeviceArray) -> int:
    if not hasattr(array.array, "is_cuda"):
        return array.stream
    import torch

    return torch.cuda.current_stream(array.ordinal).cuda_stream
