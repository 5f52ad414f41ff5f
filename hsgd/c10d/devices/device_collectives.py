"""Collectives of torch.distributed on CUDA tensors, in the order of torch's streams.

No call waits for the device. A collective is ordered after the work that torch's current stream has
queued; its wait() orders the then current stream after the result; and torch's allocator learns
which stream uses a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsgd.base.codes import OP_CODES
from hsgd.c10d.collectives import Collectives
from hsgd.c10d.torch_versions import keep_from_dynamo
from hsgd.comm.communicator import Comm
from hsgd.comm.device.device_comm import DeviceComm
from hsgd.errors import HsgdError

__all__ = ["DeviceCollectives", "DeviceWork"]

_STREAMS = 4  # one collective may begin before the previous one ends


@keep_from_dynamo
class DeviceWork(dist.Work):
    """A queued collective on CUDA tensors; `check` raises the error of a failed one."""

    def __init__(
        self, tensors: list[Tensor], side: torch.cuda.Stream, check: Callable[[], None]
    ) -> None:
        super().__init__()
        self._tensors, self._side, self._check = tensors, side, check
        self._end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._end.record(side)
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for the result, without blocking the host.

        Raises the error of the collective if it is known to have failed. `timeout` is ignored.
        """
        self._check()
        torch.cuda.current_stream(self._side.device).wait_event(self._end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._end.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._check()
        except HsgdError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Return a Future whose callbacks run at once, on a stream ordered after the result."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._side.device])
            with torch.cuda.stream(self._side):
                self._future.set_result(self._tensors)
        return self._future


@keep_from_dynamo
class DeviceCollectives(Collectives):
    """Collectives on CUDA tensors in "cpu:hsgd,cuda:hsgd"; collective and blocking to construct."""

    _device_type = "cuda"

    def __init__(
        self, store: Any, name: str, rank: int, members: list[int], timeout: timedelta
    ) -> None:
        super().__init__(store, f"{name}/cuda", rank, members, timeout)
        self._buckets = None  # gradients are in device memory
        self._comm = _DeviceSide(self._comm)
        self._sides: dict[int, Any] = {}

    def _is_unwatched(self) -> bool:
        return False

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._sides:
            make: Any = torch.cuda.Stream
            streams = [make(index, priority=-1) for _ in range(_STREAMS)]
            self._sides[index] = itertools.cycle(streams)
        stream: torch.cuda.Stream = next(self._sides[index])
        return stream

    def _submit(
        self,
        what: str,
        call: Callable[[], None],
        tensors: list[Tensor],
        opts: Any,
        given: Sequence[Tensor] | None = None,
    ) -> Any:
        """Queue the collective, whether or not the call is blocking."""
        used = [*tensors, *(given or ())]
        side = self._side(used[0].device)
        recorder = self._flight_recorder()
        run = call if recorder is None else lambda: recorder.run(what, call, used, tensors)
        side.wait_stream(torch.cuda.current_stream(side.device))
        try:
            with torch.cuda.stream(side):
                run()
        finally:
            for tensor in used:
                if tensor.layout == torch.strided:
                    tensor.record_stream(side)
        return DeviceWork(tensors, side, self._comm.check)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all ranks have called this and their current streams are empty; blocking."""
        torch.cuda.current_stream().synchronize()
        self._comm.barrier()
        return DeviceWork([], torch.cuda.current_stream(), lambda: None)


class _DeviceSide:
    """The collectives of a Comm on flat CUDA tensors of equal sizes, as Collectives calls them."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.abort, self.close, self.barrier = comm.abort, comm.close, comm.barrier

    @property
    def closed(self) -> bool:
        return self._comm.closed

    def _device(self, array: Tensor) -> DeviceComm:
        return self._comm.device_comm(array)

    def check(self) -> None:
        """Raise the error of a failed collective, if any."""
        self._comm.check_device()

    def allreduce(self, array: Tensor, op: str, out: Tensor) -> None:
        self._device(array).allreduce(array, OP_CODES[op], out, None).wait()

    def broadcast(self, array: Tensor, root: int) -> None:
        self._device(array).broadcast(array, root, None).wait()

    def reduce_scatter(self, array: Tensor, op: str, out: Tensor) -> None:
        self._device(array).reduce_scatter(array, OP_CODES[op], out, None, None).wait()

    def allgather(self, array: Tensor, out: Tensor) -> None:
        if not array.is_cuda:  # counts of sparse tensors
            self._comm.allgather(array, out=out)
            return
        rows = [array.numel()] * self._comm.size
        self._device(array).allgather(array, out, None, rows).wait()

    def alltoall(self, array: Tensor, counts: list[int], out: Tensor) -> None:
        self._device(array).alltoall(array, counts, out, None)[0].wait()
