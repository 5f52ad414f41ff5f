"""The communicators of DiLoCo: all ranks, those of a worker, and those that speak for workers.

Owns them, and that no rank waits for one that has failed. Never moves weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

import torch
from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError, ReplicasDiffer
from hsgd.optim.optimizer_ranks import OptimizerRanks, Terms
from hsgd.optim.worker_group import WorkerGroup, split_workers
from torch import Tensor

__all__ = ["WorkerComms"]


class WorkerComms(OptimizerRanks):
    """Made collectively over `comm`, blocking; None: this rank alone, local. group, parameters: as
    DiLoCo's. alike: as WorkerGroup's. terms: as OptimizerRanks'.

    comm: of all ranks. between: of the workers' first ranks; None: this is none. inside: this
    rank's worker, where it has several ranks. count: of workers.
    Raises ValueError and TypeError for groups that cannot be, and what collectives raise.
    """

    def __init__(
        self,
        comm: Any,
        group: Literal["node"] | int | None,
        parameters: Sequence[Tensor],
        alike: Sequence[tuple[str, Tensor]],
        terms: Terms,
    ) -> None:
        self._alike = alike
        self.inside: WorkerGroup | None = None
        super().__init__(comm, "DiLoCo", terms)
        try:
            # One rank that waits for others is divided by no number.
            self.between = self._split(None if comm is None else group, parameters)
            self.count = self.combine(int(self.between is not None), "sum")
        except BaseException:
            self.leave(abort=True)
            raise

    def combine(self, number: int, op: Literal["sum", "min", "max"]) -> int:
        """Of all ranks' numbers; collective, blocking."""
        return int(self.comm.allreduce(np.array([number], np.int64), op, name="DiLoCo")[0])

    def furthest(self, steps: int, has_outer: bool) -> tuple[int, int, bool]:
        """The lowest rank of those that have taken the most steps, of those with outer weights
        where there are any; its steps; whether it has outer weights. Collective, blocking.
        """
        size, rank = self.comm.size, self.comm.rank
        place = steps * size + size - 1 - rank
        furthest = self.combine(place if has_outer else -1, "max")
        any_outer = furthest >= 0
        if not any_outer:
            furthest = self.combine(place, "max")
        return size - 1 - furthest % size, furthest // size, any_outer

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Where a collective in it fails, so do those in which other ranks wait for this one, now
        and not at the deadline. The error names no rank by number where workers number them anew.
        Those who compared replicas all have the error, which numbers ranks as `comm`.
        """
        try:
            yield
        except ReplicasDiffer:
            raise
        except HsgdError as error:
            self.abort()
            if self.count != self.comm.size:
                error.rank = -1
            raise

    def leave(self, abort: bool) -> None:
        """Close what was made; `abort`: so that nobody waits for this rank."""
        try:
            if self.inside is not None:
                self.inside.unhook()
                self.inside = None
        finally:
            super().leave(abort)

    def _split(
        self, group: Literal["node"] | int | None, parameters: Sequence[Tensor]
    ) -> Comm | None:
        """The workers' first ranks, where this is one; makes its worker, if that has several."""
        comm = self.comm
        if group is None:
            workers = comm.split(0, key=comm.rank)
            self._made += [workers] if workers is not None else []
            return workers
        size = None if group == "node" else group
        members = split_workers(comm, size, 'DiLoCo: give group "node", None or a number; group')
        self._made.append(members)
        workers = comm.split(0 if members.rank == 0 else None, key=comm.rank)
        self._made += [workers] if workers is not None else []
        wrong = [
            f"parameter {index} is {p.dtype} on {p.device}"
            for index, p in enumerate(parameters)
            if p.dtype != torch.float32 or p.device.type != "cpu"
        ]
        if self.combine(int(members.size > 1 and bool(wrong)), "max"):
            raise TypeError(
                f"DiLoCo: {(wrong or ['a parameter of another rank is not float32'])[0]}, and "
                "workers of several ranks average gradients in float32 on the CPU; use group=None, "
                "and average gradients inside the node by other means"
            )
        if members.size > 1:
            self.inside = WorkerGroup(members, parameters, self._alike, comm.rank)
        return workers
