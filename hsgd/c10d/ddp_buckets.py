"""Buckets of DistributedDataParallel in memory that the ranks of a node share.

DDP allocates its buckets itself and reduces the same ones in every step; in shared memory they need
no staging. Only buckets from autograd's engine are moved: memory of the reducer, without NumPy
arrays or raw pointers to it. Their values stay, and every tensor that is a view of the bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hsgd import _native
from hsgd.comm.communicator import Comm
from hsgd.errors import SharedMemoryError

__all__ = ["SharedBuckets"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SharedBuckets:
    """The buckets that one communicator reduces; for one thread at a time."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._seen: dict[int, StorageWeakRef] = {}  # keeps addresses of seen storages in use
        self._closed = comm.size == 1 or not hasattr(torch.UntypedStorage, "_swap_data_ptr_")

    def concerns(self, tensor: Tensor) -> bool:
        """Return whether to call move() first, equal on ranks that reduce equal shapes; local."""
        if self._closed or tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            return False
        # For smaller ones the agreement costs more than staging.
        return tensor.numel() * tensor.element_size() >= _native.LEAST_BUCKET_BYTES

    def move(self, tensor: Tensor, is_bucket: bool) -> None:
        """Move a bucket seen for the second time, if all ranks agree; collective, blocking.

        DDP makes its buckets anew after the first step. A rank that has joined early takes part
        with zeros of its own: then nothing is moved.
        """
        storage = tensor.untyped_storage()
        self._flag[0] = is_bucket and self._is_due(tensor, storage)
        self._comm.allreduce(self._flag, "min", out=self._flag, name="bucket memory")
        if not self._flag[0]:
            return
        try:
            shared = self._comm.empty(tensor.numel(), tensor.dtype, "bucket memory")
        except SharedMemoryError:  # on all ranks; staging needs no more memory
            self._closed = True
            return
        shared.copy_(tensor.detach().view(-1))
        swap: Any = storage._swap_data_ptr_  # type: ignore[attr-defined]
        swap(shared.untyped_storage())

    def _is_due(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        if not storage.resizable():  # foreign memory, or moved already
            return False
        if not tensor.is_contiguous() or storage.nbytes() != tensor.numel() * tensor.element_size():
            return False
        if storage._cdata in self._seen:
            return True
        known: list[tuple[int, Any]] = list(self._seen.items())
        for gone in [address for address, reference in known if reference.expired()]:
            del self._seen[gone]
        self._seen[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return False
