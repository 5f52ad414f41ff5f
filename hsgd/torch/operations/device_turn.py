"""DeviceTurn: the place of an operation on CUDA tensors in the order of torch's streams.

Owns the stream on which the operation's thread queues it: after what the submitting thread had
queued, before what whoever takes the result queues. Never waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeviceTurn", "device_of"]


def device_of(tensors: Sequence[Tensor]) -> str:
    """ "cuda" where tensors lie there, "" in host memory. Raises ValueError for a mixture."""
    if not any(tensor.is_cuda for tensor in tensors):
        return ""
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("Tensors of one operation must lie on one device.")
    return "cuda"


class DeviceTurn:
    """Made by the thread that submits the operation, whose tensors are on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._given.record(torch.cuda.current_stream(device))
        self._taken: Any = None

    @contextlib.contextmanager
    def taken(self, tensors: Sequence[Tensor], others: Sequence[DeviceTurn] = ()) -> Iterator[None]:
        """A context that queues on a stream of its own. tensors: that are used there. others: of
        operations that are run with this one.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for turn in (self, *others):
                stream.wait_event(turn._given)
            try:
                yield
            finally:
                for tensor in tensors:
                    tensor.record_stream(stream)
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(stream)
            for turn in (self, *others):
                turn._taken = end

    def order(self, results: Any) -> None:
        """Have this thread's current stream come after the operation; never blocks."""
        if self._taken is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._taken)
        for tensor in results if isinstance(results, tuple | list) else [results]:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)
