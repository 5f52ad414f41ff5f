"""barrier and join."""

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
    """Return when all ranks of a process set have called this; collective, blocking. Raises
    HorovodInternalError when one is lost.
    """
    synchronize(submit(coordinator_of(process_set, "Barrier"), Barrier("barrier"), wake=False))


def join(device: int = -1) -> int:
    """Say that this rank has no more data; blocking until all ranks have said so.

    Until then it takes part in the allreduces of the others with zeros, and so in the steps of each
    DistributedOptimizer that has made a step here, unless with a strategy of its own, node_shared,
    sparse gradients, or MPI without MPI_THREAD_MULTIPLE: then the others wait in such a step.
    Everything else fails on all ranks that call it while one has joined, but barriers.
    device: taken for Horovod's sake.
    Returns the rank that joined last.
    """
    coordinator = coordinator_of(global_process_set, "Join")
    job = runtime.current()
    unnamed = job.unnamed(global_process_set.process_set_id)
    operation = Join(JOIN, time.time(), unnamed.used)
    with standing_in(job.joining if job.threaded else (), coordinator.end):
        last: int = synchronize(submit(coordinator, operation, wake=False))
    unnamed.used = operation.unnamed  # alike on all ranks again
    return last
