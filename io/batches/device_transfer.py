"""Batches on the device of a training loop: copies by a CUDA stream of their own.

They run while the loop's stream still computes. The host does not wait, but for what does not lie
in page-locked memory.
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
    """Called with a batch, returns the same with its tensors on `device`, also those in mappings,
    lists, tuples and Ragged; what has a method to(), such as a PackedSequence, is asked to move
    itself. On CUDA, what the stream does that is current at the call comes after the copies.
    Picklable.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        """Raises ValueError for what is no device, or none of this machine."""
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
        """Whether it is a CUDA device."""
        return self.device.type == "cuda"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    def __call__(self, batch: Any) -> Any:
        import torch

        if not self.is_cuda:
            return _mapped(batch, lambda each: each.to(self.device), lambda it: it.to(self.device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        device = self._stream.device  # with its number, whatever becomes the current one
        using = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            moved = _mapped(batch, lambda each: each.to(device, non_blocking=True), lambda it: it)
        using.wait_stream(self._stream)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(using)  # its memory waits for the loop's work to be used again
            return tensor

        return _mapped(moved, keep, lambda it: it.to(device))


def _mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any]
) -> Any:
    """The same with all dense tensors changed. other: what becomes of what else has a to()."""
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
