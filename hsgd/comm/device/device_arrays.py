"""Checked arrays of CUDA devices: torch tensors, and `__cuda_array_interface__` (CuPy, Numba)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hsgd import _native
from hsgd.base.codes import DTYPE_CODES, DTYPES

__all__ = ["DeviceArray", "empty_like"]

_DEFAULT_STREAM = 0  # CUDA's legacy default stream


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array of a device, with a reference to the original.

    Attributes:
        stream: the CUDA stream on which it may be used, as an integer: torch's current stream of
            the device, or the stream in `__cuda_array_interface__`.
    """

    array: Any
    address: int
    shape: tuple[int, ...]
    dtype: str
    ordinal: int
    stream: int

    @classmethod
    def of(cls, array: Any, what: str, cuda_library: str) -> DeviceArray:
        """Describe `array`; TypeError or ValueError, which begin with `what`, if it cannot be used.

        The driver library `cuda_library` may be asked for the device of an array.
        """
        if hasattr(array, "is_cuda"):
            return cls._of_tensor(array, what)
        return cls._of_interface(array, what, cuda_library)

    @classmethod
    def _of_tensor(cls, tensor: Any, what: str) -> DeviceArray:
        import torch

        name = str(tensor.dtype).removeprefix("torch.")
        _check_dtype(name, what)
        if not tensor.is_cuda:
            raise ValueError(
                f"{what}: one array is on the CPU, the other on a CUDA device; pass both on one "
                "device"
            )
        if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg():
            raise ValueError(f"{what}: the tensor is not contiguous; pass tensor.contiguous()")
        ordinal = tensor.device.index
        stream = torch.cuda.current_stream(ordinal).cuda_stream
        return cls(tensor, tensor.data_ptr(), tuple(tensor.shape), name, ordinal, stream)

    @classmethod
    def _of_interface(cls, array: Any, what: str, cuda_library: str) -> DeviceArray:
        import numpy as np

        told = getattr(array, "__cuda_array_interface__", None)
        if told is None:
            raise TypeError(
                f"{what}: {type(array).__name__} is not an array on a CUDA device, but the other "
                "one is; pass both on one device"
            )
        dtype = np.dtype(told["typestr"])
        _check_dtype(dtype.name, what)
        shape = tuple(told["shape"])
        if not _is_contiguous(shape, told.get("strides"), dtype.itemsize):
            raise ValueError(f"{what}: the array is not C-contiguous; pass a contiguous copy")
        address = int(told["data"][0])
        device = getattr(getattr(array, "device", None), "id", None)  # CuPy's name
        if device is None:
            device = _native.device_of_address(cuda_library, address) if address else 0
        stream = told.get("stream")
        stream = _DEFAULT_STREAM if stream is None else int(stream)
        return cls(array, address, shape, dtype.name, int(device), stream)

    @property
    def memory(self) -> _native.DeviceMemory:
        """Description of the memory for the core."""
        return _native.DeviceMemory(self.address, DTYPE_CODES[self.dtype], list(self.shape))

    @property
    def rows(self) -> int:
        """The first extent; a 0-d array is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])


def _check_dtype(name: str, what: str) -> None:
    if name not in DTYPE_CODES:
        raise TypeError(f"{what}: dtype {name} is not supported; use one of {', '.join(DTYPES)}")


def _is_contiguous(shape: Sequence[int], strides: Sequence[int] | None, item_bytes: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = item_bytes
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True


def empty_like(array: Any, shape: Sequence[int], what: str) -> Any:
    """Make an array of another shape on the device of `array`; TypeError for unknown libraries."""
    if hasattr(array, "is_cuda"):
        return array.detach().new_empty(tuple(shape))
    library = type(array).__module__.partition(".")[0]
    if library == "cupy":
        import cupy

        return cupy.empty(tuple(shape), array.dtype)
    raise TypeError(f"{what}: give out=, hsgd cannot make an array of {type(array).__name__}")
