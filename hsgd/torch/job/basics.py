"""Horovod's basic functions: init, shutdown, ranks and sizes, and what was built.

Without a job they raise ValueError, as Horovod's do.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hsgd.base import built
from hsgd.base.closing import failing_with
from hsgd.comm.communicator import Comm
from hsgd.comm.connect import mpi_calls
from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.environment import agent_link
from hsgd.jobs.environment.agent_link import AgentLink
from hsgd.jobs.launch import as_horovod
from hsgd.metrics import Counters
from hsgd.torch.job import operation_timeline, runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.settings import HorovodSettings, ignored

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Set up the job; collective, blocking. A second call does nothing.

    Args:
        comm: an mpi4py communicator, a list of ranks of MPI.COMM_WORLD, which alone make the call,
            or an hsgd.Comm, which shutdown() closes. None is MPI.COMM_WORLD, or under torchrun all
            its workers, without MPI.
        process_sets: sets to register, equal on all ranks, or "dynamic" to add them later.

    Raises:
        ValueError: a set is duplicate, or ranks are not in MPI.COMM_WORLD or lack this one.
        CollectiveTimeout: a rank does not make the call.
        MissingExtra: mpi4py is missing.
        LaunchError: the MPI libraries differ, or MPI sees one rank of several started ones.
    """
    if runtime.is_initialized():
        return
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is "{process_sets}"; give a list, or "dynamic"')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    agent = agent_link.link() if comm is None else None
    if agent is not None and process_sets:
        raise ValueError(
            "init: process_sets are not made again when ranks of an elastic job come and go; make "
            "them with add_process_set() in the function of elastic.run"
        )
    settings, report = HorovodSettings.from_env(), Config.from_env().report
    job = _start(comm, settings, agent)
    global_process_set.ranks = job.members(0)
    if job.comm.rank == 0:
        as_horovod.announce(ignored())
    if report:
        job.endings.append(lambda: _report(job))
    try:
        for index, process_set in enumerate(process_sets or ()):
            _register(job, process_set, index)
    except BaseException:
        runtime.stop()
        raise
    if settings.timeline is not None and settings.timeline.upper() != "DYNAMIC":
        start_timeline(settings.timeline)


def _start(comm: Any, settings: HorovodSettings, agent: AgentLink | None) -> runtime.Runtime:
    """Return the job; under an agent, retry with the remaining ranks if some are lost."""
    while True:
        try:
            job = runtime.start(_communicator(comm), settings, _threads_supported)
        except (PeerLost, CollectiveTimeout) as lost:
            if agent is None:
                raise
            agent.leave(lost)
        except HsgdError as error:
            other_way = as_horovod.other_way("HOROVOD_PLUGIN must be the same on all ranks; ")
            error.args = (f"{error}{other_way}", *error.args[1:])
            raise
        else:
            if agent is not None:
                job.endings.append(agent.forget_world)
                agent.when_broken(job.abort)
            return job


def _report(job: runtime.Runtime) -> None:
    """Print this rank's counters, except after an error, when a waiting thread may hold them."""
    if failing_with() is not None:
        return
    with contextlib.suppress(HsgdError):  # a communicator is closed already
        print(f"hsgd: rank {job.comm.rank}: hsgd.torch: {job.metrics().line()}", file=sys.stderr)


def shutdown() -> None:
    """Close the job; local. Open operations fail, here and on other ranks."""
    runtime.stop()


def is_initialized() -> bool:
    """Return whether there is a job between init() and shutdown(); local."""
    return runtime.is_initialized()


def rank() -> int:
    """Return the rank in the job, from 0; local."""
    return runtime.current().comm.rank


def size() -> int:
    """Return how many ranks the job has; local."""
    return runtime.current().comm.size


def local_rank() -> int:
    """Return the rank among those of this node, from 0; local."""
    return runtime.current().place.local_rank


def local_size() -> int:
    """Return how many ranks this node has; local."""
    return runtime.current().place.local_size


def cross_rank() -> int:
    """Return the index of this node among those that have this local rank; local."""
    return runtime.current().place.cross_rank


def cross_size() -> int:
    """Return how many nodes have this local rank; local."""
    return runtime.current().place.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks; local."""
    return runtime.is_initialized() and runtime.current().place.homogeneous


def mpi_threads_supported() -> bool:
    """Return whether MPI serves several threads at once; local. Raises ValueError without MPI."""
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    return _mpi_threads()


def mpi_enabled() -> bool:
    """Return whether the job runs over MPI; local."""
    return runtime.is_initialized() and runtime.current().comm.mpi is not None


def mpi_built() -> bool:
    """Return whether hsgd was built for an MPI; local."""
    return bool(built.read().mpis)


def gloo_enabled() -> bool:
    """Return False: hsgd does not use gloo."""
    return False


def gloo_built() -> bool:
    """Return False: hsgd does not use gloo."""
    return False


def nccl_built() -> int:
    """Return 0: hsgd computes on host memory."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: hsgd computes on host memory."""
    return False


def rocm_built() -> bool:
    """Return False: hsgd computes on host memory."""
    return False


def metrics() -> Counters:
    """Return calls, bytes and seconds of this rank's collectives since init(); hsgd only; local."""
    return runtime.current().metrics()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a trace of this rank to `file_path`, with ".rank" appended from rank 1 on; local.

    `mark_cycles` is ignored, since hsgd has no cycles.
    """
    operation_timeline.start(runtime.current(), file_path)


def stop_timeline() -> None:
    """End the trace and close its file, if there is one; local."""
    runtime.current()
    operation_timeline.stop()


def _communicator(comm: Any) -> Any:
    if comm is None or isinstance(comm, Comm):
        return comm
    if not isinstance(comm, Iterable):
        return comm
    ranks = list(comm)
    if not ranks:
        return None
    world = mpi_calls.world()
    if world.rank not in ranks or not all(0 <= rank < world.size for rank in ranks):
        raise ValueError(
            f"init: the ranks {ranks} must lie in 0 to {world.size - 1}, and rank {world.rank} be "
            "one of them; call init() only for those"
        )
    late = (
        f"so not all of the ranks {ranks} have called init() with these ranks, or one has ended or "
        "hangs; look at all of them, or raise HSGD_TIMEOUT_S"
    )
    ranks = sorted(set(ranks))
    return mpi_calls.communicator_of(ranks, Config.from_env(), "init", late=late)


def _threads_supported(comm: Comm) -> bool:
    return comm.mpi is None or _mpi_threads()


def _mpi_threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def _register(job: runtime.Runtime, process_set: ProcessSet, index: int) -> None:
    if process_set.ranks is not None:
        number = job.register(process_set.ranks)
    else:
        number, process_set.ranks = job.register_own(_ranks_of(process_set.mpi_comm))
    if number is None:
        raise ValueError(
            f"Horovod could not be initialized because process_sets entry number {index} is a "
            f"duplicate: {process_set}"
        )
    process_set.process_set_id = number


def _ranks_of(comm: Any) -> list[int]:
    """Return the ranks in MPI.COMM_WORLD of the members of an mpi4py communicator, sorted."""
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return sorted(MPI.Group.Translate_ranks(group, range(group.size), world))
