"""Schemas of the operators of `torch.ops.hsgd`: arguments, and that they communicate.

Each operator writes into a tensor that it is given and is marked as having side effects. So a
compiled program keeps the call even if nothing reads the result: another rank may need the data.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.fx

from hsgd.operators import kernels

__all__ = ["define", "ops"]

_SCHEMAS = {
    "allreduce_": "(Tensor(a!) tensor, int comm, str op) -> ()",
    "broadcast_": "(Tensor(a!) tensor, int root, int comm) -> ()",
    "allreduce_into": "(Tensor(a!) out, Tensor tensor, int comm, str op) -> ()",
    "allgather_into": "(Tensor(a!) out, Tensor tensor, int comm) -> ()",
    "reduce_scatter_into": "(Tensor(a!) out, Tensor tensor, int comm, str op) -> ()",
}
_lock = threading.Lock()
_defined: set[str] = set()


def ops() -> Any:
    """Return torch.ops.hsgd; local."""
    return torch.ops.hsgd


def define() -> None:
    """Define the operators, with CPU kernels, once; HsgdError if the library fails; local."""
    with _lock:
        kernels.load()
        for name in _SCHEMAS.keys() - _defined:
            torch.library.define(f"hsgd::{name}", _SCHEMAS[name])
            torch.library.register_fake(f"hsgd::{name}", _nothing)
            torch.fx.node.has_side_effect(getattr(ops(), name).default)
            kernels.implement(name)
            _defined.add(name)


def _nothing(*_: Any) -> None:
    """Do nothing, for tensors without memory."""
