"""DeviceTransfer: copies batches to the device of a training loop, in a CUDA stream of its own.

Copies run while the loop's stream still computes. The host waits only for memory that is not
page-locked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from ..format.ragged import Ragged

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceTransfer"]


class DeviceTransfer:
    """A function from a batch to the same batch with its tensors on `device`.

    Also moves tensors in mappings, lists, tuples and Ragged; other objects with a method to(), such
    as a PackedSequence, move themselves. On CUDA, later work of the stream that is current at the
    call comes after the copies. Picklable.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        """Choose the device. Raises ValueError if it is invalid or not in this machine."""
        import torch

        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: {error}") from None
        count = torch.cuda.device_count() if self.is_cuda else 1
        if count == 0:
            raise ValueError(f"device={device!r} needs torch with a CUDA device; leave it out here")
        if self.is_cuda and (self.device.index or 0) >= count:
            raise ValueError(f"device={device!r}: this process sees {count} CUDA device(s)")
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    def __call__(self, batch: Any) -> Any:
        import torch

        if not self.is_cuda:
            return _mapped(batch, lambda each: each.to(self.device), lambda it: it.to(self.device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        device = self._stream.device  # with its number, even if the current device changes
        using = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            moved = _mapped(batch, lambda each: each.to(device, non_blocking=True), lambda it: it)
        using.wait_stream(self._stream)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(using)  # its memory is reused only after the loop's work
            return tensor

        return _mapped(moved, keep, lambda it: it.to(device))


def _mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any]
) -> Any:
    """Apply `change` to all dense tensors, and `other` to other objects with a method to()."""
    import torch

    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return change(value)
    if isinstance(value, Ragged):
        parts = (_mapped(part, change, other) for part in (value.values, value.offsets))
        return Ragged(*parts)
    if callable(getattr(value, "to", None)):
        return other(value)
    if isinstance(value, MutableMapping):
        filled = copy.copy(value)
        for key, each in value.items():
            filled[key] = _mapped(each, change, other)
        return filled
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change, other) for each in value))
    if isinstance(value, (list, tuple)):
        moved = [_mapped(each, change, other) for each in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value
