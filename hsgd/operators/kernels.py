"""Who implements the operators of `torch.ops.hsgd` on CPU tensors.

Owns the choice: libhsgd_operators, which was built over torch's stable ABI and serves torch from
2.10 on, or Python, where that library was not built or torch is older. Both describe a collective
to the core in the same way, as ranks may have either.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hsgd.errors import HsgdError

if TYPE_CHECKING:
    from hsgd.comm import Comm, Op

__all__ = ["LIBRARY", "are_native", "forget", "install", "keep"]

LIBRARY = Path(__file__).parent.with_name("libhsgd_operators.so")
_STABLE_SINCE = (2, 10)  # torch's C functions that the library calls
_comms: dict[int, Comm] = {}


@functools.cache
def _native() -> Any:
    """The library, or None."""
    version = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(map(int, version)) < _STABLE_SINCE or not LIBRARY.is_file():
        return None
    torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    library = ctypes.CDLL(str(LIBRARY))
    library.hsgd_operators_keep.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.hsgd_operators_forget.argtypes = [ctypes.c_int64]
    library.hsgd_operators_forget.restype = None
    return library


def are_native() -> bool:
    """Whether operators run without Python; local."""
    return _native() is not None


def install() -> None:
    """Give torch the kernels of the operators, which are defined; local, once."""
    if _native() is not None:
        return  # loading it has registered them
    for kernel in (_allreduce, _allreduce_, _broadcast_, _allgather, _reduce_scatter):
        torch.library.impl(f"hsgd::{kernel.__name__[1:]}", "CPU", kernel)


def keep(number: int, comm: Comm) -> None:
    """Let operators find `comm` by its number; local."""
    library = _native()
    if library is None:
        _comms[number] = comm
    elif library.hsgd_operators_keep(number, comm._native.shared_address()) != 0:
        raise MemoryError("operators.group: no memory for another communicator")


def forget(number: int) -> None:
    """Take keep() back; local."""
    library = _native()
    if library is None:
        _comms.pop(number, None)
    else:
        library.hsgd_operators_forget(number)


def _comm_of(number: int) -> Comm:
    try:
        return _comms[number]
    except KeyError:
        raise HsgdError(
            f"torch.ops.hsgd: no open communicator has the number {number}; take it from "
            "hsgd.operators.group(comm)"
        ) from None


def _checked(what: str, number: int, size: int) -> Comm:
    comm = _comm_of(number)
    if size != comm.size:
        raise HsgdError(
            f"{what}: size is {size}, the communicator has {comm.size} ranks; take both from "
            "hsgd.operators.group(comm)"
        )
    return comm


def _allreduce(tensor: Tensor, comm: int, op: Op) -> Tensor:
    return _comm_of(comm).allreduce(tensor.contiguous(), op)


def _allreduce_(tensor: Tensor, comm: int, op: Op) -> None:
    dense = tensor.contiguous()
    _comm_of(comm).allreduce(dense, op, out=dense)
    if dense is not tensor:
        tensor.copy_(dense)


def _broadcast_(tensor: Tensor, root: int, comm: int) -> None:
    dense = tensor.contiguous()
    _comm_of(comm).broadcast(dense, root)
    if dense is not tensor:
        tensor.copy_(dense)


def _allgather(tensor: Tensor, size: int, comm: int) -> Tensor:
    rows, *rest = tensor.shape or (1,)
    out = tensor.new_empty((rows * size, *rest))
    checked = _checked("allgather", comm, size)
    _, counts = checked._native.allgather(tensor.contiguous(), out, None)
    other = next((rank for rank, count in enumerate(counts) if count != rows), None)
    if other is not None:
        raise ValueError(
            f"allgather: rank {other} has {counts[other]} rows, rank {checked.rank} has {rows}; "
            "operators take as many from each"
        )
    return out


def _reduce_scatter(tensor: Tensor, size: int, comm: int, op: Op) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not tensor.dim() or rows % size:
        raise HsgdError(f"reduce_scatter: {rows} rows cannot be split evenly over {size} ranks")
    return _checked("reduce_scatter", comm, size).reduce_scatter(tensor.contiguous(), op)
