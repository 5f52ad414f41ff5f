"""WorkerComms: the communicators of DiLoCo, for all ranks, inside workers and between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hsgd.comm.agree import agree
from hsgd.errors import HsgdError, ReplicasDiffer
from hsgd.optim.optimizer_ranks import OptimizerRanks, Terms
from hsgd.optim.worker_group import WorkerGroup

__all__ = ["WorkerComms"]


class WorkerComms(OptimizerRanks):
    """The communicators of one DiLoCo; made collectively over `comm`, blocking.

    None as `comm` is this rank alone, local. `inside` is this rank's worker, if it has several
    ranks. `alike` is as for WorkerGroup, `terms` as for OptimizerRanks. Raises ValueError and
    TypeError for impossible groups.
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
            # A single rank that waits for restart() cannot be divided.
            self._form(None if comm is None else group, parameters)
        except BaseException:
            self.leave(abort=True)
            raise

    def combine(self, number: int, op: Literal["min", "max"]) -> int:
        return int(self.comm.allreduce(np.array([number], np.int64), op, name="DiLoCo")[0])

    def furthest(self, steps: int, has_outer: bool) -> tuple[int, int, bool]:
        """Return rank, steps and `has_outer` of the rank to continue from; collective, blocking.

        It is the lowest rank with the most steps, if possible with outer weights.
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
        """Abort all communicators if a collective in the block fails, so that other ranks fail now.

        The error has no rank if workers number ranks differently. All ranks that compared replicas
        raise ReplicasDiffer anyway; it keeps the rank numbers of `comm`.
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

    def leave(self, abort: bool = False) -> None:
        try:
            if self.inside is not None:
                self.inside.unhook()
                self.inside = None
        finally:
            super().leave(abort)

    def _form(self, group: Literal["node"] | int | None, parameters: Sequence[Tensor]) -> None:
        if group is None:
            self.between = self.split(0)  # exchanges run in a thread of their own
            return
        size = None if group == "node" else group
        members = self.divide(size, 'DiLoCo: give group "node", None or a number; group')

        def refuse_others() -> dict[str, object]:
            for index, p in enumerate(parameters if members.size > 1 else ()):
                if p.dtype != torch.float32 or p.device.type != "cpu":
                    raise TypeError(
                        f"DiLoCo: parameter {index} is {p.dtype} on {p.device}, and workers of "
                        "several ranks average gradients in float32 on the CPU; use group=None, "
                        "and average gradients inside the node by other means"
                    )
            return {}

        agree(self.comm, "DiLoCo", refuse_others)
        if members.size > 1:
            self.inside = WorkerGroup(members, parameters, self._alike, self.comm.rank)
