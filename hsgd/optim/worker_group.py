"""WorkerGroup: ranks that train as one worker, with averaged gradients and equal weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost, ReplicasDiffer
from hsgd.optim.flat_vectors import joined, views_of
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = ["WorkerGroup"]

# Kinds of failures that share() passes on to the other ranks.
_KINDS: tuple[type[HsgdError], ...] = (PeerLost, CollectiveTimeout, ReplicasDiffer)


class WorkerGroup:
    """Ranks that train as one worker; made collectively over `comm`, which the caller closes.

    Only the first rank, the leader, exchanges with other workers.

    Args:
        parameters: float32 on the CPU, equal in shape on all ranks of the group.
        alike: (name, tensor) pairs that must be equal on all ranks of the group when gradients are
            averaged; each call compares a share of them.
        rank: this rank's number in errors about `alike`.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[Tensor],
        alike: Sequence[tuple[str, Tensor]],
        rank: int,
    ) -> None:
        self.comm = comm
        self._guard = ReplicaGuard(lambda: list(alike), rank=rank)
        self._parameters = list(parameters)
        # After the gradients: which parameters have one, and whether the leader wants to end.
        count = sum(p.numel() for p in self._parameters)
        self._buffer: Tensor = comm.empty(
            count + len(self._parameters) + 1, torch.float32, name="gradients of the group"
        )
        self._views = views_of(self._buffer[:count], self._parameters)
        self._present = self._buffer[count:-1]
        came = self._came = [False] * len(self._parameters)
        self._hooks = []
        for index, parameter in enumerate(self._parameters):

            def on_gradient(_: Tensor, index: int = index) -> None:
                came[index] = True

            hook = parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader of the group."""
        return self.comm.rank == 0

    @property
    def gradient_bytes(self) -> int:
        """Payload of one average_gradients(), in bytes."""
        return self._buffer.numel() * 4

    def average_gradients(self, ending: bool) -> bool:
        """Make .grad the mean over the group; collective, blocking. Returns the leader's `ending`.

        A parameter without a gradient on all ranks keeps none. Gradients may come from a backward
        pass or be assigned. Raises ReplicasDiffer on all ranks of the group.
        """
        self._guard.check(self.comm)
        for index, (p, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if p.grad is None:
                self._came[index] = False
            elif p.grad.data_ptr() != view.data_ptr():
                self._came[index] = True  # the user may have assigned it
                view.copy_(p.grad)
            if not self._came[index]:
                view.zero_()
        self._present.copy_(torch.tensor(self._came, dtype=torch.float32))
        self._buffer[-1] = float(ending and self.leads)
        self.comm.allreduce(self._buffer, "mean", out=self._buffer, name="gradients of the group")
        for came, p, view in zip(
            self._present.tolist(), self._parameters, self._views, strict=True
        ):
            p.grad = view if came > 0 else None
        self._came[:] = [False] * len(self._came)
        return float(self._buffer[-1]) > 0

    def zero_gradients(self) -> None:
        """Zero gradients in place; the next backward pass accumulates in the shared buffer."""
        self._buffer.zero_()
        self._came[:] = [False] * len(self._came)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make small float32 tensors the mean over the group; collective, blocking."""
        if tensors:
            flat = joined(tensors)
            self.comm.allreduce(flat, "mean", out=flat, name="buffers of the group")
            for tensor, mean in zip(tensors, views_of(flat, tensors), strict=True):
                tensor.copy_(mean)

    def follow(self, delta: Tensor, weights: Sequence[Tensor]) -> None:
        """Copy the leader's `delta` to all ranks, which subtract it; collective, blocking."""
        self.comm.broadcast(delta, name="move of the group")
        if not self.leads:
            for weight, move in zip(weights, views_of(delta, weights), strict=True):
                weight.sub_(move)

    def share(self, flat: Tensor, read: Callable[[], Sequence[Tensor]], what: str) -> None:
        """Fill `flat` on all ranks with what the leader's read() returns; collective, blocking.

        If read() fails, the leader raises its error, the others one of the same kind for PeerLost,
        CollectiveTimeout and ReplicasDiffer, else HsgdError; it calls the data `what`.
        """
        outcome, failure = torch.zeros(1, dtype=torch.int32), None
        if self.leads:
            try:
                at = 0
                for part in read():
                    flat[at : at + part.numel()].copy_(part.reshape(-1))
                    at += part.numel()
            except BaseException as error:  # of any kind: the others wait in the broadcast
                failure = error
                kinds = (index for index, kind in enumerate(_KINDS) if isinstance(error, kind))
                outcome[0] = 1 + next(kinds, len(_KINDS))
        self.comm.broadcast(outcome, name=f"whether the group has {what}")
        if failure is not None:
            raise failure
        if outcome[0]:
            kind = (*_KINDS, HsgdError)[int(outcome[0]) - 1]
            raise kind(f"the first rank of the group failed: no {what} for its other ranks")
        self.comm.broadcast(flat, name=f"{what} for the group")

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
