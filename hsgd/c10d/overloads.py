"""Translation of a process group's calls into one form, as torch does in C++ for its own groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

__all__ = ["usual"]

_OPTIONS = (
    *(AllgatherOptions, AllreduceOptions, AllToAllOptions, BarrierOptions, BroadcastOptions),
    *(GatherOptions, ReduceOptions, ReduceScatterOptions, ScatterOptions),
)
Arguments = tuple[Any, ...]


def usual(method: str, arguments: Sequence[Any], named: dict[str, Any]) -> Arguments:
    """Return arguments in the form of torch.distributed's functions; TypeError if none fits."""
    if arguments and isinstance(arguments[-1], _OPTIONS) and not named:
        return tuple(arguments)
    form = _FORMS.get(method)
    if form is None:
        return (*arguments, *named.values())
    names = {new: named.pop(old) for old, new in _NAMES.items() if old in named}
    return form(*arguments, **names, **named)


_NAMES = {
    "tensor": "tensors",
    "output_tensor": "outputs",
    "output_tensors": "outputs",
    "output": "outputs",
    "input_tensor": "inputs",
    "input_tensors": "inputs",
    "input": "inputs",
}


def _filled(options: Any, timeout: timedelta | None, **values: Any) -> Any:
    for name, value in values.items():
        if value is not None:
            setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _nested(lists: Any) -> list[list[torch.Tensor]]:
    found = list(lists)
    return [found] if found and isinstance(found[0], torch.Tensor) else found


def _allreduce(
    tensors: Any, op: Any = None, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(AllreduceOptions(), timeout, reduceOp=op)
    return _listed(tensors), options


def _broadcast(
    tensors: Any, root: int = 0, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(BroadcastOptions(), timeout, rootRank=root)
    return _listed(tensors), options


def _reduce(
    tensors: Any, root: int = 0, op: Any = None, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    if opts is None:
        opts = _filled(ReduceOptions(), timeout, rootRank=root, reduceOp=op)
    return _listed(tensors), opts


def _allgather(
    outputs: Any, inputs: Any, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(AllgatherOptions(), timeout)
    return _nested(outputs), _listed(inputs), options


def _gather(
    outputs: Any, inputs: Any, root: int = 0, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(GatherOptions(), timeout, rootRank=root)
    return _nested(outputs), _listed(inputs), options


def _scatter(
    outputs: Any, inputs: Any, root: int = 0, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(ScatterOptions(), timeout, rootRank=root)
    return _listed(outputs), _nested(inputs), options


def _reduce_scatter(
    outputs: Any, inputs: Any, op: Any = None, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(ReduceScatterOptions(), timeout, reduceOp=op)
    return _listed(outputs), _nested(inputs), options


def _alltoall(
    outputs: Any, inputs: Any, timeout: timedelta | None = None, opts: Any = None
) -> Arguments:
    options = opts if opts is not None else _filled(AllToAllOptions(), timeout)
    return list(outputs), list(inputs), options


def _barrier(timeout: timedelta | None = None, opts: Any = None) -> Arguments:
    return (opts if opts is not None else _filled(BarrierOptions(), timeout),)


_FORMS: dict[str, Callable[..., Arguments]] = {
    "allgather": _allgather,
    "allreduce": _allreduce,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}
