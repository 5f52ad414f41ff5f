"""Kernels of the operators of `torch.ops.hsgd` on CPU tensors.

They are in libhsgd_operators, which is built over torch's stable ABI for torch 2.10 and newer, or
in Python, without that library or with an older torch. Both describe a collective to the core in
the same way, as ranks may have either.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hsgd.errors import HsgdError

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm, Op

__all__ = ["LIBRARY", "forget", "implement", "keep", "load", "why_in_python"]

LIBRARY = Path(__file__).parent.with_name("libhsgd_operators.so")
_STABLE_SINCE = (2, 10)  # torch's C functions that the library calls
_comms: weakref.WeakValueDictionary[int, Comm] = weakref.WeakValueDictionary()


def why_in_python() -> str:
    """Return why operators go through Python; "" if they do not. Local."""
    version = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(map(int, version)) < _STABLE_SINCE:
        return f"torch {torch.__version__} is older than 2.10"
    return (
        ""
        if LIBRARY.is_file()
        else (
            "hsgd was built before torch 2.10 or newer was here; build it again: pip install "
            "--force-reinstall --no-deps . in a clone of hsgd"
        )
    )


@functools.cache
def load() -> Any:
    """Load the library with its kernels, or return None; HsgdError if it fails; local."""
    if why_in_python():
        return None
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
        library = ctypes.PyDLL(str(LIBRARY))  # holds the GIL: no other thread closes a comm
    except OSError as error:
        raise HsgdError(f"hsgd.operators: {error}; build hsgd again with this torch") from None
    library.hsgd_operators_keep.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    return library


@functools.cache
def _unlocked() -> Any:
    """Return the library for calls without the GIL: ending a communicator may wait."""
    library = ctypes.CDLL(str(LIBRARY))
    library.hsgd_operators_forget.argtypes = [ctypes.c_int64]
    library.hsgd_operators_forget.restype = None
    return library


def implement(name: str) -> None:
    """Register the Python kernel of an operator, unless the library has one; local."""
    if load() is None:
        torch.library.impl(f"hsgd::{name}", "CPU", _KERNELS[name])


def keep(number: int, comm: Comm) -> None:
    """Register `comm` under its number; local."""
    library = load()
    if library is None:
        _comms[number] = comm
    elif library.hsgd_operators_keep(number, comm._native.shared_address()) != 0:
        raise MemoryError("operators.group: no memory for another communicator")


def forget(number: int) -> None:
    """Undo keep(); local."""
    if load() is None:
        _comms.pop(number, None)
    else:
        _unlocked().hsgd_operators_forget(number)


def _comm_of(number: int) -> Comm:
    try:
        return _comms[number]
    except KeyError:
        raise HsgdError(
            f"torch.ops.hsgd: no open communicator has the number {number}; take it from "
            "hsgd.operators.group(comm)"
        ) from None


def _put_back(dense: Tensor, tensor: Tensor) -> None:
    if dense is not tensor:
        tensor.copy_(dense)


def _allreduce_into(out: Tensor, tensor: Tensor, comm: int, op: Op) -> None:
    dense = out.contiguous()
    _comm_of(comm).allreduce(tensor.contiguous(), op, out=dense)
    _put_back(dense, out)


def _allreduce_(tensor: Tensor, comm: int, op: Op) -> None:
    _allreduce_into(tensor, tensor, comm, op)


def _broadcast_(tensor: Tensor, root: int, comm: int) -> None:
    dense = tensor.contiguous()
    _comm_of(comm).broadcast(dense, root)
    _put_back(dense, tensor)


def _allgather_into(out: Tensor, tensor: Tensor, comm: int) -> None:
    found = _comm_of(comm)
    dense = out.contiguous()
    rows = tensor.shape[0] if tensor.dim() else 1
    _, counts = found._native.allgather(tensor.contiguous(), dense, None)
    other = next((rank for rank, count in enumerate(counts) if count != rows), None)
    if other is not None:
        raise ValueError(
            f"allgather: rank {other} has {counts[other]} rows, rank {found.rank} has {rows}; "
            "torch.ops.hsgd needs the same number of rows on every rank"
        )
    _put_back(dense, out)


def _reduce_scatter_into(out: Tensor, tensor: Tensor, comm: int, op: Op) -> None:
    dense = out.contiguous()
    _comm_of(comm).reduce_scatter(tensor.contiguous(), op, out=dense)
    _put_back(dense, out)


_KERNELS: dict[str, Callable[..., object]] = {
    "allreduce_": _allreduce_,
    "broadcast_": _broadcast_,
    "allreduce_into": _allreduce_into,
    "allgather_into": _allgather_into,
    "reduce_scatter_into": _reduce_scatter_into,
}
