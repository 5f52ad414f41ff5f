"""Horovod's barrier() and join()."""

from __future__ import annotations

import time

from hsgd.torch.collectives.submission import coordinator_of, submit, synchronize
from hsgd.torch.gradients.stand_in import standing_in
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.negotiation.round_plan import JOIN
from hsgd.torch.operations.operation import Barrier, Join

__all__ = ["barrier", "join"]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called this; collective, blocking.

    Raises HorovodInternalError if a rank is lost.
    """
    synchronize(submit(coordinator_of(process_set, "Barrier"), Barrier("barrier"), wake=False))


def join(device: int = -1) -> int:
    """Announce that this rank has no more data; blocks until all ranks have, returns the last one.

    Meanwhile it takes part with zeros in the allreduces of the others, and so in the steps of each
    DistributedOptimizer that has made a step here. Exceptions, with which the others wait in such a
    step: another strategy, node_shared, sparse gradients, or MPI without MPI_THREAD_MULTIPLE. All
    other operations except barriers fail on the ranks that call them. `device` is ignored, as in
    Horovod's signature.
    """
    coordinator = coordinator_of(global_process_set, "Join")
    job = runtime.current()
    unnamed = job.unnamed(global_process_set.process_set_id)
    operation = Join(JOIN, time.time(), unnamed.used)
    with standing_in(job.joining if job.threaded else (), coordinator.end):
        last: int = synchronize(submit(coordinator, operation, wake=False))
    unnamed.used = operation.unnamed  # equal on all ranks again
    return last
