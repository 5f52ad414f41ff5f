"""Page-locked memory for batches from torch's allocator, and tensors that this allocator knows.

A non-blocking copy to a CUDA device (`non_blocking=True`) may read a batch long after the loop has
dropped it. Only torch's allocator knows that: torch reports each such copy to it, and it reuses a
block after the copies are done. So each batch gets its block from the allocator and gives it back,
and tensors share the storage of the block, by which torch finds it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["block_bytes", "bytes_of", "new_block", "tensor_of"]


class _Bytes:
    """The owner of a block, from which NumPy makes an array."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.block.data_ptr(), False)
        return {"shape": (self.block.numel(),), "typestr": "|u1", "data": data, "version": 3}


def block_bytes(nbytes: int) -> int:
    """Return the bytes that torch's allocator takes for `nbytes`: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def new_block(nbytes: int) -> torch.Tensor:
    """Allocate page-locked bytes. Raises RuntimeError if the driver refuses."""
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(f"pinning {nbytes} bytes failed: {error}") from None


def bytes_of(block: torch.Tensor, dropped: Callable[[], None]) -> np.ndarray[Any, Any]:
    """Return the bytes of a block as an array.

    `dropped` is called, in any thread, when the last array over them, the last tensor of
    tensor_of() and the last view of one are gone.
    """
    weakref.finalize(block.untyped_storage(), dropped).atexit = False
    return np.asarray(_Bytes(block))


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make a tensor of the same memory, with the storage of the block if it lies in one."""
    import torch

    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if not isinstance(owner, _Bytes) or not array.size:
        return torch.from_numpy(array)
    offset = array.__array_interface__["data"][0] - owner.block.data_ptr()
    steps = [divmod(nbytes, array.itemsize) for nbytes in (offset, *array.strides)]
    assert not any(rest for _, rest in steps), "elements of a batch lie at whole places"
    start, *strides = (whole for whole, _ in steps)
    # Not a view of the block: in autograd the fields of a batch must be independent.
    tensor = torch.empty(0, dtype=_torch_dtype(array.dtype), device="cpu")
    return tensor.set_(owner.block.untyped_storage(), start, array.shape, strides)


@functools.lru_cache(maxsize=64)
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype
