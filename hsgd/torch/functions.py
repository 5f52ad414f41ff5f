"""Broadcasts of models, optimizers and Python objects, for scripts before training."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hsgd.errors import MissingExtra
from hsgd.optim.node_shared.node_shared_optimizer import NodeSharedOptimizer
from hsgd.optim.wrapping_optimizer import WrappingOptimizer
from hsgd.torch.adasum_optimizer import AdasumDistributed
from hsgd.torch.collectives.allgather import allgather
from hsgd.torch.collectives.broadcast import broadcast_, broadcast_async_
from hsgd.torch.collectives.submission import synchronize
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.optimizer import Distributed

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with the root's; collective, blocking, in place.

    `params` is a dict (model.state_dict()), or a list or generator of parameters or of (name,
    parameter) pairs. Raises ValueError for values that are not tensors.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = []
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"invalid params: {name} is {type(tensor).__name__}, not a tensor")
        copy = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        handles.append((broadcast_async_(copy, root_rank, name), tensor, copy))
    for handle, tensor, copy in handles:
        synchronize(handle)
        if copy is not tensor:
            with torch.no_grad():
                tensor.copy_(copy)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite an optimizer's state with the root's; collective, blocking.

    The optimizer may be plain or a DistributedOptimizer; no gradients are sent. An optimizer
    without state first gets that of a step with zero gradients, and keeps these gradients, as with
    Horovod; unlike with Horovod, weight decay does not change the parameters then. Sparse
    embeddings of `model` get sparse gradients. Raises ValueError for LBFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    _make_state(optimizer, model)
    state = optimizer.state_dict()
    tensors: list[Tensor] = []

    def keep_apart(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach())
        layout = tuple(value.shape), value.dtype, not value.is_cpu
        return _TensorReference(len(tensors) - 1, *layout)

    skeleton = broadcast_object(tree_map(keep_apart, state), root_rank, "optimizer_state")
    if runtime.current().comm.rank != root_rank:
        own = [each for group in optimizer.param_groups for each in group["params"]]
        here = own[0].device if own else torch.device("cpu")
        tensors = [
            torch.empty(each.shape, dtype=each.dtype, device=here if each.on_device else "cpu")
            for each in tree_leaves(skeleton)
            if isinstance(each, _TensorReference)
        ]
    tensors = [tensor.contiguous() for tensor in tensors]
    broadcast_parameters(
        [(f"optimizer_state.{n}", tensor) for n, tensor in enumerate(tensors)], root_rank
    )
    if runtime.current().comm.rank != root_rank or getattr(optimizer, "loads_together", False):
        whole = tree_map(
            lambda value: tensors[value.index] if isinstance(value, _TensorReference) else value,
            skeleton,
        )
        _without_front(optimizer).load_state_dict(whole)


def _make_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Create the optimizer's state, as Horovod does before a broadcast; local."""
    if isinstance(optimizer, NodeSharedOptimizer | WrappingOptimizer):
        return  # their steps are collective
    if optimizer.state_dict()["state"]:
        return
    tables = (
        [each for each in model.modules() if isinstance(each, torch.nn.Embedding)] if model else []
    )
    sparse = {id(table.weight) for table in tables if table.sparse}
    groups = optimizer.param_groups
    parameters = [each for group in groups for each in group["params"] if each.requires_grad]
    for parameter in parameters:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        is_sparse = isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
        if is_sparse or isinstance(optimizer, torch.optim.SparseAdam):
            gradient = gradient.to_sparse()
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter in parameters]
    _without_front(optimizer).step()
    with torch.no_grad():
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values)


@dataclass
class _TensorReference:
    """Stands for a tensor in a state that is sent without its tensors."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_device: bool


def _without_front(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer with the local step() and load_state_dict() of the user's class."""
    for front in (Distributed, AdasumDistributed):
        if isinstance(optimizer, front):
            return super(front, optimizer)
    return optimizer


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on all ranks, the original on the root; collective, blocking.

    It is sent by pickle, or by cloudpickle if installed, which functions and classes of a script
    need. Threads that call at the same time need a `name` each.
    """
    name = "broadcast_object" if name is None else name  # not the type, which may differ
    is_root = runtime.current().comm.rank == root_rank
    data = _pack(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpack(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; collective, blocking.

    Threads that call at the same time need a `name` each.
    """
    name = "allgather_object" if name is None else name
    data = _pack(obj)
    lengths = allgather(torch.tensor([data.numel()], dtype=torch.int64, device="cpu"), f"{name}.sz")
    gathered = allgather(data, f"{name}.t")
    return [_unpack(piece) for piece in torch.split(gathered, lengths.tolist())]


def _pack(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)


def _unpack(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _dumps(obj: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        try:
            return pickle.dumps(obj)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise MissingExtra(
                f"{type(obj).__name__} cannot be sent by pickle ({error}), perhaps by cloudpickle, "
                "which is not installed; pip install cloudpickle"
            ) from None
    packed: bytes = cloudpickle.dumps(obj)
    return packed
