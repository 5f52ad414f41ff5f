"""Checks of NotifiedTree's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError
from hsgd.optim.layouts import layout_terms
from hsgd.optim.notified_tree.tree_parts import Layer, layers_of
from hsgd.optim.wrapping_optimizer import check_choice

Roots = Literal["first", "shared"]

__all__ = ["Roots", "check_threads", "terms_of"]


def terms_of(
    optimizer: Optimizer, model: nn.Module, options: Mapping[str, Any], *, whole_step: bool
) -> dict[str, object]:
    """Check the arguments, and return what must be equal on all ranks; local."""
    _check_arguments(optimizer, layers_of(model), options["arity"], options["part_bytes"])
    _check_roots(options["roots"], whole_step)
    return {**options, "optimizer": type(optimizer).__name__, **layout_terms(model)}


def _check_arguments(
    optimizer: Optimizer, layers: Sequence[Layer], arity: int | None, part_bytes: int | None
) -> None:
    if arity is not None and arity < 1:
        raise ValueError(f"NotifiedTree: arity is {arity}; give 1 or more, or None")
    if part_bytes is not None and part_bytes < 0:
        raise ValueError(
            f"NotifiedTree: part_bytes is {part_bytes}; give bytes, 0 to cut nothing, or None"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("NotifiedTree: LBFGS needs closures; use an optimizer that does not")
    trained = {p for layer in layers for p in layer.parameters}
    if not trained:
        raise ValueError("NotifiedTree: the model has no parameters that require gradients")
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad and p not in trained:
                raise ValueError(
                    f"NotifiedTree: a parameter of group {index}, shape {tuple(p.shape)}, is not "
                    "one of the model's; pass the model that the optimizer trains"
                )
    for layer in layers:
        for p in layer.parameters:
            dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
            if p.device.type != "cpu" or p.layout is not torch.strided or not dense:
                raise ValueError(
                    f'NotifiedTree: a parameter of layer "{layer.name}" is on {p.device} or not '
                    "dense; use dense CPU parameters"
                )


def _check_roots(roots: str, whole_step: bool) -> None:
    check_choice("NotifiedTree: roots", roots, get_args(Roots))
    if roots == "shared" and whole_step:
        raise ValueError(
            "NotifiedTree: before_update needs the gradients of all layers on one rank; give "
            'roots="first"'
        )


def check_threads(comm: Comm) -> None:
    """Raise HsgdError if MPI's thread level is too low for the engine."""
    if comm.cross_size > 1:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise HsgdError(
                "NotifiedTree: MPI was initialized for less than MPI_THREAD_MULTIPLE; set "
                "mpi4py.rc.thread_level = 'multiple' before the import of MPI, or give "
                "network='sockets'"
            )
