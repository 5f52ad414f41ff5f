"""Translation of a process group's calls into one form, as torch does in C++ for its own groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

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


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _nested(lists: Any) -> list[Any]:
    found = list(lists)
    return [found] if found and isinstance(found[0], torch.Tensor) else found


class _Form(NamedTuple):
    """Another form of a method: first `tensors`, then values of `fields` of its options."""

    options: type[Any]
    tensors: dict[str, Callable[[Any], list[Any]]]
    fields: tuple[str, ...] = ()


_FORMS = {
    "allgather": _Form(AllgatherOptions, {"outputs": _nested, "inputs": _listed}),
    "allreduce": _Form(AllreduceOptions, {"tensors": _listed}, ("op",)),
    "alltoall": _Form(AllToAllOptions, {"outputs": list, "inputs": list}),
    "barrier": _Form(BarrierOptions, {}),
    "broadcast": _Form(BroadcastOptions, {"tensors": _listed}, ("root",)),
    "gather": _Form(GatherOptions, {"outputs": _nested, "inputs": _listed}, ("root",)),
    "reduce": _Form(ReduceOptions, {"tensors": _listed}, ("root", "op")),
    "reduce_scatter": _Form(ReduceScatterOptions, {"outputs": _listed, "inputs": _nested}, ("op",)),
    "scatter": _Form(ScatterOptions, {"outputs": _listed, "inputs": _nested}, ("root",)),
}
_OPTIONS = tuple(form.options for form in _FORMS.values())
_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
_NAMES = {
    "tensor": "tensors",
    **dict.fromkeys(("output_tensor", "output_tensors", "output"), "outputs"),
    **dict.fromkeys(("input_tensor", "input_tensors", "input"), "inputs"),
}


def usual(method: str, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return arguments in the form of torch.distributed's functions; TypeError if none fits."""
    if arguments and isinstance(arguments[-1], _OPTIONS) and not named:
        return tuple(arguments)
    form = _FORMS.get(method)
    if form is None:
        return (*arguments, *named.values())
    names = {_NAMES.get(name, name): value for name, value in named.items()}
    bound = _signature(method).bind(*arguments, **names)
    bound.apply_defaults()
    given = bound.arguments
    options = given["opts"]
    if options is None:
        options = form.options()
        for name in (*form.fields, "timeout"):
            if given[name] is not None:
                setattr(options, _FIELDS[name], given[name])
    return (*(take(given[name]) for name, take in form.tensors.items()), options)


@functools.cache
def _signature(method: str) -> Signature:
    form, kind = _FORMS[method], Parameter.POSITIONAL_OR_KEYWORD
    defaults = {name: 0 if name == "root" else None for name in (*form.fields, "timeout", "opts")}
    return Signature(
        [Parameter(name, kind) for name in form.tensors]
        + [Parameter(name, kind, default=value) for name, value in defaults.items()]
    )
