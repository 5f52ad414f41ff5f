"""Page-locked memory of batches, from torch's allocator, and tensors that this allocator knows.

A copy to a CUDA device that does not wait (`non_blocking=True`) may read a batch long after the
loop has dropped it. Only torch's allocator knows: torch tells it of each such copy, and it uses a
block again when the copies are done. So a block is given back to it with every batch, and tensors
are views of the block, by which torch finds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["bytes_of", "new_block", "tensor_of"]


class _Bytes:
    """What NumPy makes an array of: arrays keep it, and so do the tensors of tensor_of()."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.block.data_ptr(), False)
        return {"shape": (self.block.numel(),), "typestr": "|u1", "data": data, "version": 3}


def new_block(nbytes: int) -> torch.Tensor:
    """Page-locked bytes. Raises RuntimeError when the driver refuses."""
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise RuntimeError(f"pinning {nbytes} bytes failed: {error}") from None


def bytes_of(block: torch.Tensor, dropped: Callable[[], None]) -> np.ndarray[Any, Any]:
    """The bytes of a block. dropped: called, in any thread, when the last array over them and the
    last tensor of tensor_of() has died. Views of such a tensor keep the memory, but not this.
    """
    owner = _Bytes(block)
    weakref.finalize(owner, dropped).atexit = False
    return np.asarray(owner)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The same memory as a tensor: a view of the block where the array lies in one."""
    import torch

    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if not isinstance(owner, _Bytes) or not array.size:
        return torch.from_numpy(array)
    block, item = owner.block, array.itemsize
    offset = array.__array_interface__["data"][0] - block.data_ptr()
    if offset % item or any(stride % item for stride in array.strides):
        return torch.from_numpy(array)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    whole = block[: block.numel() // item * item].view(dtype)
    strides = [stride // item for stride in array.strides]
    tensor = whole.as_strided(array.shape, strides, offset // item)
    weakref.finalize(tensor, _kept, owner).atexit = False
    return tensor


def _kept(_: _Bytes) -> None:
    """Called when a tensor has died, which kept this until then."""
