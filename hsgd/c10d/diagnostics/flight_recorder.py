"""Entries of hsgd's collectives in torch's Flight Recorder, for analysis after a hang.

torch 2.15 attaches the recorder to every group, and accepts entries of other backends. A group of
hsgd needs a default backend then, whose name is in its records. TORCH_FR_BUFFER_SIZE turns entries
on. An entry is made when a collective begins to run, and is retired when it ended well: calls
queued behind one that hangs have no entry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from hsgd.c10d import NAME
from hsgd.errors import CollectiveTimeout, PeerLost

__all__ = ["FlightRecorder", "is_wanted", "name_backend"]

_CPU = torch.device("cpu")
# torch's names: the first variable that is set has the number of entries.
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")


class _NamedBackend(_distributed_c10d.Backend):
    """A backend with a name, which serves no call."""

    def getBackendName(self) -> str:
        return NAME


class _Done(dist.Work):
    """The work of an ended collective, for torch's recorder."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


class _RunningBackend(_NamedBackend):
    """A backend that runs `call` for every collective: torch's hooks run before and after."""

    call: Callable[[], None]

    def _run(self, *arguments: Any) -> _Done:
        self.call()
        return _Done()

    allreduce = allreduce_coalesced = broadcast = reduce = barrier = _run
    allgather = all_gather_single = _allgather_base = gather = scatter = _run
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _run
    reduce_scatter = reduce_scatter_single = _reduce_scatter_base = _run
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _run
    alltoall = all_to_all_single = alltoall_base = _run


def _add(group: dist.ProcessGroup, backend: _NamedBackend) -> None:
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(_CPU, custom, backend)
    group._set_default_backend(custom)


def name_backend(group: dist.ProcessGroup) -> Any:
    """Give a group a default backend if torch may attach its recorder to it; local.

    torch asks the backend for names and hooks, and fails without one; it calls no collective of it.
    The caller must keep the result as long as the group.
    """
    if not hasattr(_distributed_c10d, "FlightRecorderHook"):
        return None
    backend = _NamedBackend(group.rank(), group.size())
    _add(group, backend)
    return backend


def is_wanted() -> bool:
    """Return whether this torch can record and its variable asks for it; local."""
    size = next((value for name in _SIZES if (value := os.environ.get(name))), "0")
    return hasattr(_distributed_c10d, "_dump_fr_trace_file") and int(size) > 0


class FlightRecorder:
    """The entries of one group; `members` are global ranks by group rank. One call at a time."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], store: Any) -> None:
        self._rank = members[group.rank()]
        self._group = dist.ProcessGroup(store, group.rank(), group.size())
        self._backend = _RunningBackend(group.rank(), group.size())
        _add(self._group, self._backend)
        self._group._set_group_name(group.group_name)
        self._group._set_group_desc(group.group_desc)
        attach: Any = _distributed_c10d.FlightRecorderHook.attach  # type: ignore[attr-defined]
        self._hook = attach(self._group, list(members))

    def run(
        self, what: str, call: Callable[[], None], given: Sequence[Tensor], out: Sequence[Tensor]
    ) -> None:
        """Execute `call`, the collective `what`, and record its inputs and outputs; blocking.

        Writes torch's dump if a rank is lost or late. Raises the errors of `call`.
        """
        tensors = [*given, *out]
        if any(each.layout != torch.strided or each.device != _CPU for each in tensors):
            return call()  # torch would look for another backend
        self._backend.call = call
        try:
            _asked(self._group, what, [*map(Tensor.detach, given)], [*map(Tensor.detach, out)])
        except (CollectiveTimeout, PeerLost):
            self._dump()
            raise

    def _dump(self) -> None:
        choice = next((value for name in _DUMPS if (value := os.environ.get(name))), "1")
        if choice.lower() in ("0", "n", "no", "false"):
            return
        with contextlib.suppress(RuntimeError):  # the error of the collective says more
            _distributed_c10d._dump_fr_trace_file(self._rank, backend=NAME)  # type: ignore[attr-defined]


def _asked(group: Any, what: str, given: list[Tensor], out: list[Tensor]) -> None:
    """Call the collective that hsgd names `what`, as torch.distributed would."""
    forms: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.allreduce(given),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced(given),
        "reduce": lambda: group.reduce(given, _distributed_c10d.ReduceOptions()),
        "broadcast": lambda: group.broadcast(given, _distributed_c10d.BroadcastOptions()),
        "reduce_scatter": lambda: group.reduce_scatter(out, [given]),
        "reduce_scatter_tensor": lambda: group.reduce_scatter_tensor_coalesced(out, given),
        "all_gather": lambda: group.allgather([out], given),
        "all_gather_into_tensor": lambda: group.allgather_into_tensor_coalesced(out, given),
        "gather": lambda: group.gather([out], given, _distributed_c10d.GatherOptions()),
        "scatter": lambda: group.scatter(out, [given], _distributed_c10d.ScatterOptions()),
        "all_to_all_single": lambda: group.alltoall_base(*out, *given, [], []),
        "all_to_all": lambda: group.alltoall(out, given),
        "barrier": lambda: group.barrier(),
    }
    forms[what]()
