"""What torch knows of the operators of `torch.ops.hsgd`: arguments, and that they communicate.

Owns the definitions, which are made once, whoever implements them: see kernels.py. Each operator
writes into a tensor that it is given, and is marked as one with side effects: what nobody reads is
still sent, as another rank may read it, and a compiled program keeps the call.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.fx

import torch
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
    """torch.ops.hsgd; local."""
    return torch.ops.hsgd


def define() -> None:
    """Make the operators known to torch, with kernels for CPU tensors; local, a second call does
    nothing. Raises HsgdError where the library does not load.
    """
    with _lock:
        kernels.load()
        for name in _SCHEMAS.keys() - _defined:
            torch.library.define(f"hsgd::{name}", _SCHEMAS[name])
            torch.library.register_fake(f"hsgd::{name}", _nothing)
            torch.fx.node.has_side_effect(getattr(ops(), name).default)
            kernels.implement(name)
            _defined.add(name)


def _nothing(*_: Any) -> None:
    """Of tensors without memory."""
