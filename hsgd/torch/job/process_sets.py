"""ProcessSet: a group of ranks that runs collectives, as scripts hold it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsgd.torch.job import runtime

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Ranks of the job that run collectives together, for init() or add_process_set().

    `ranks_or_comm`: global ranks, or an mpi4py communicator (for init() only).
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            if not hasattr(ranks_or_comm, "Get_group"):
                raise ValueError(
                    "ProcessSet should be initialized with a list of process ranks or an mpi4py "
                    "Comm object"
                ) from None
            self.mpi_comm = ranks_or_comm
            return
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm "
                "object"
            )
        self.ranks = ranks

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if it is not registered."""
        if self.process_set_id is None:
            return None
        return len(runtime.current().members(self.process_set_id))

    def rank(self) -> int | None:
        """Return the rank in the set, None if unregistered; raises ValueError on other ranks."""
        if self.process_set_id is None:
            return None
        job = runtime.current()
        members = job.members(self.process_set_id)
        if job.comm.rank not in members:
            raise ValueError("Process is not part of provided process set.")
        return members.index(job.comm.rank)

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None if its ranks are not known yet."""
        if self.ranks is None:
            return None
        return runtime.current().comm.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set after init(); collective over all ranks, blocking.

    Raises ValueError for a duplicate set, and without init(process_sets="dynamic") or
    HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks is None:
        raise NotImplementedError(
            "Dynamically adding process sets defined by an MPI communicator is not implemented. "
            "Please build the process set via a list of ranks."
        )
    added.process_set_id = runtime.current().add_process_set(added.ranks)
    if added.process_set_id is None:
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; collective over all ranks, blocking. Returns whether it existed.

    The global set stays.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set.process_set_id = None
    return runtime.current().remove_process_set(number)
