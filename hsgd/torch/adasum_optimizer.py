"""AdasumDistributed: DistributedOptimizer with op=Adasum, which combines the ranks' steps."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.optim.replicas.replica_guard import ReplicaGuard
from hsgd.torch.collectives.allreduce import grouped_allreduce
from hsgd.torch.compression import Compressor
from hsgd.torch.exceptions import core_errors_as_horovods
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import ProcessSet
from hsgd.torch.operations.reductions import ADASUM

__all__ = ["AdasumDistributed"]


class AdasumDistributed(torch.optim.Optimizer):
    """The base that is put before the class of a user's optimizer; communicates in step() only."""

    _names: dict[int, str]
    _compression: type[Compressor]
    process_set: ProcessSet
    backward_passes_per_step: int
    _guard: ReplicaGuard
    _job: Any = None  # the job that _comm belongs to
    _comm: Comm | None = None

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """Horovod's attribute, which scripts read."""
        groups = self.param_groups
        return {each: self._names[id(each)] for group in groups for each in group["params"]}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Store the number only: gradients accumulate until step() in any case."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, as with Horovod."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, as Horovod does."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step on this rank's gradients, then combine changes by Adasum; collective, blocking."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        parameters = [each for group in groups for each in group["params"] if each.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        super().step()
        sent, contexts = [], []
        for parameter, start in zip(parameters, before, strict=True):
            tensor, context = self._compression.compress((parameter - start).contiguous())
            sent.append(tensor)
            contexts.append(context)
        if sent:
            name = f"adasum.{self._names[id(parameters[0])]}"
            found = grouped_allreduce(sent, name=name, op=ADASUM, process_set=self.process_set)
        for parameter, start, tensor, context in zip(
            parameters, before, found if sent else (), contexts, strict=True
        ):
            parameter.copy_(start + self._compression.decompress(tensor, context))
        self._compare_replicas()
        return loss

    def _compare_replicas(self) -> None:
        job = runtime.current()
        if self._job is not job:
            number = self.process_set.process_set_id
            self._job, self._comm = job, job.private_comm(number, "replica guard")
        assert self._comm is not None
        with core_errors_as_horovods():
            self._guard.check(self._comm)
