"""Submission of tensors as named operations, and handles for their results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.job import horovod_path, runtime
from hsgd.torch.job.process_sets import ProcessSet
from hsgd.torch.negotiation.coordinator import Coordinator, Operation

__all__ = ["coordinator_of", "hand_over", "local_root", "named", "poll", "submit", "synchronize"]

_numbers = itertools.count()
_open: dict[int, tuple[Coordinator, Operation]] = {}
_horovods: dict[int, tuple[Any, Any]] = {}  # Horovod's module, and its handle


def coordinator_of(process_set: ProcessSet, what: str) -> Coordinator:
    """Return the coordinator of a process set; local.

    Raises HorovodInternalError before init(), ValueError for sets that are unknown or without this
    rank.
    """
    if not runtime.is_initialized():
        raise HorovodInternalError(runtime.UNINITIALIZED)
    return runtime.current().coordinator(process_set.process_set_id, what)


def named(kind: str, name: str | None, process_set: ProcessSet) -> str:
    """Return the full name of an operation; unnamed ones are numbered per process set."""
    if name is not None:
        return f"{kind}.{name}"
    if not runtime.is_initialized():
        return kind
    return f"{kind}.noname.{runtime.current().next_unnamed(process_set.process_set_id)}"


def local_root(process_set: ProcessSet, root_rank: int) -> int:
    """Return a global rank's rank in the process set; raises ValueError as Horovod; local."""
    members = runtime.current().members(process_set.process_set_id or 0)
    if root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set"
        )
    return members.index(root_rank)


def submit(coordinator: Coordinator, operation: Operation, *, wake: bool = True) -> int:
    """Submit an operation and return its handle; local."""
    coordinator.submit(operation, wake=wake)
    number = next(_numbers)
    _open[number] = (coordinator, operation)
    return number


def hand_over(
    tensors: Sequence[Tensor],
    kind: str,
    *arguments: Any,
    grouped: bool = False,
    suffix: str = "",
    **options: Any,
) -> int | None:
    """Let Horovod start an operation on tensors of another device type; collective, not blocking.

    Returns a handle, or None if the tensors are on the CPU or CUDA, which hsgd handles itself.
    `arguments` and `options` follow the tensors in Horovod's {grouped_}kind_async{suffix}().
    """
    if all(tensor.device.type in ("cpu", "cuda") for tensor in tensors):
        return None
    horovod = horovod_path.for_device(tensors[0].device, kind)
    function = getattr(horovod, f"{'grouped_' * grouped}{kind}_async{suffix}")
    number = next(_numbers)
    handle = function(list(tensors) if grouped else tensors[0], *arguments, **options)
    _horovods[number] = (horovod, handle)
    return number


def poll(handle: int) -> bool:
    """Return whether an operation is done, so that synchronize() does not block; local."""
    if handle in _horovods:
        horovod, theirs = _horovods[handle]
        return bool(horovod.poll(theirs))
    found = _open.get(handle)
    if found is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    coordinator, operation = found
    return coordinator.poll(operation)


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result, once; blocking.

    Returns None for handles that are not open. Raises HorovodInternalError, with the core's error
    as its cause, if the operation failed on any rank.
    """
    if handle in _horovods:
        horovod, theirs = _horovods.pop(handle)
        return horovod.synchronize(theirs)
    found = _open.get(handle)
    if found is None:
        return None
    coordinator, operation = found
    coordinator.wait(operation)
    _open.pop(handle, None)
    if operation.error is not None:
        raise HorovodInternalError(str(operation.error)) from operation.error.__cause__
    turn = getattr(operation, "turn", None)
    if turn is not None:
        turn.order(operation.result)
    return operation.result
