"""DeviceTurn: the place of an operation on CUDA tensors in the order of torch's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeviceTurn", "device_of"]


def device_of(tensors: Sequence[Tensor]) -> str:
    """Return "cuda" or "" for host memory; raises ValueError if tensors are on several devices."""
    if not any(tensor.is_cuda for tensor in tensors):
        return ""
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("Tensors of one operation must lie on one device.")
    return "cuda"


class DeviceTurn:
    """Orders an operation after work queued by the submitting thread, and before its users' work.

    Made by the thread that submits the operation; it never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._given = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._given.record(torch.cuda.current_stream(device))
        self._taken: Any = None

    @contextlib.contextmanager
    def taken(self, tensors: Sequence[Tensor], others: Sequence[DeviceTurn] = ()) -> Iterator[None]:
        """Queue work on a new stream in the block; not blocking.

        `tensors` are used there; `others` belong to operations that run together with this one.
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
        """Order this thread's current stream after the operation; never blocks."""
        if self._taken is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._taken)
        for tensor in results if isinstance(results, tuple | list) else [results]:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)
