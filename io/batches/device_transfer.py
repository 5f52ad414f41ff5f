"""Batches on the device of a training loop: the copies, and what waits for them.

Owns a CUDA stream for the copies, which so run while the loop's stream still computes. Never waits
on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..format.ragged import Ragged

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceTransfer"]


class DeviceTransfer:
    """Called with a batch, returns the same with its tensors on `device`, also those in dicts,
    lists, tuples and Ragged. On CUDA, what the stream does that is current at the call comes after
    the copies. Picklable.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        """Raises ValueError for what is no device, or none of this machine."""
        import torch

        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: {error}") from None
        count = torch.cuda.device_count() if self.device.type == "cuda" else 1
        if count == 0:
            raise ValueError(f"device={device!r} needs torch with a CUDA device; leave it out here")
        if self.device.type == "cuda" and (self.device.index or 0) >= count:
            raise ValueError(f"device={device!r}: this process sees {count} CUDA device(s)")
        self._stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stream": None}

    def __call__(self, batch: Any) -> Any:
        import torch

        if self.device.type != "cuda":
            return _mapped(batch, lambda tensor: tensor.to(self.device))
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        using = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            moved = _mapped(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
        using.wait_stream(self._stream)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(
                using
            )  # its memory is not used again before the loop's work is done
            return tensor

        return _mapped(moved, keep)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with all tensors changed."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Ragged):
        return Ragged(_mapped(value.values, change), _mapped(value.offsets, change))
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change) for each in value))
    if isinstance(value, (list, tuple)):
        moved = [_mapped(each, change) for each in value]
        return moved if isinstance(value, list) else tuple(moved)
    return value
