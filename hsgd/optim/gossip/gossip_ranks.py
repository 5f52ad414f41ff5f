"""GossipRanks: the communicators of a Gossip, for all ranks, groups and their first ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.optim.optimizer_ranks import OptimizerRanks, Terms
from hsgd.optim.replicas.replica_guard import ReplicaGuard

__all__ = ["GossipRanks", "distance_from_mean"]


class GossipRanks(OptimizerRanks):
    """The ranks of one Gossip; made collectively over `comm`, blocking.

    None as `comm` is this rank alone, local. `inside` is this rank's group, if there are groups;
    the ranks of `between` gossip. `alike` has (name, tensor) pairs that are equal within a group;
    `terms` is as for OptimizerRanks. Raises ValueError and TypeError for invalid groups.
    """

    def __init__(
        self,
        comm: Any,
        hierarchical: bool,
        group_size: int | None,
        alike: Sequence[tuple[str, Tensor]],
        terms: Terms,
    ) -> None:
        super().__init__(comm, "Gossip", terms)
        self._guard = ReplicaGuard(lambda: list(alike), rank=self.comm.rank)
        self.inside: Comm | None = None
        try:
            if hierarchical and comm is not None:  # a single rank has no group
                self.inside = self.divide(group_size, "Gossip: group_size")
        except BaseException:
            self.leave(abort=True)
            raise

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients in the group; collective in it, blocking.

        A tensor without a gradient on all ranks gets none, since weight decay would move it. Raises
        ReplicasDiffer on all ranks of the group.
        """
        assert self.inside is not None, "there are groups"
        self._guard.check(self.inside)
        used = np.array([parameter.grad is not None for parameter in parameters], np.uint8)
        self.inside.allreduce(used, "max", out=used, name="which tensors have gradients")
        for parameter in (p for p, some in zip(parameters, used, strict=True) if some):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.contiguous()
            self.inside.allreduce(gradient, "mean", out=gradient)
            if gradient is not parameter.grad:
                parameter.grad.copy_(gradient)

    def tell_group(self, vectors: Sequence[Tensor], changed: bool) -> bool:
        """Copy the first rank's vectors to its group if they `changed` there, and return that.

        Collective in the group, blocking.
        """
        assert self.inside is not None, "there are groups"
        flag = np.array([changed], np.uint8)
        self.inside.broadcast(flag, name="whether weights changed")
        for vector in vectors if flag[0] else ():
            self.inside.broadcast(vector, name="weights of the group")
        return bool(flag[0])


def distance_from_mean(comm: Comm, vectors: Sequence[Tensor]) -> float:
    """Return the root of the mean over ranks of |w - mean(w)|^2; collective, blocking."""
    squares = 0.0
    for vector in vectors:
        mean = comm.allreduce(vector, "mean", name="consensus")
        squares += float((vector - mean).double().square().sum())
    every = comm.allgather(np.array([squares]), name="consensus distance")
    return float(np.sqrt(np.mean(every)))
