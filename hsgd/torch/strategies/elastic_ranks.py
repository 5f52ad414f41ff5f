"""Which ranks an optimizer that may go on with others gets, and that it ends with their world.

Owns that in an elastic job it has none before elastic.run. Never forms them.
"""

from __future__ import annotations

import weakref

from hsgd.comm.communicator import Comm
from hsgd.jobs.environment.agent_link import link
from hsgd.optim.restartable_optimizer import RestartableOptimizer
from hsgd.torch.job import runtime

__all__ = ["end_with_job", "ranks_of_job"]


def ranks_of_job(what: str) -> Comm | None:
    """A communicator of the job's ranks for one optimizer; collective, blocking. None, and local,
    in an elastic job before the function of elastic.run, where ranks may come alone.
    """
    agent = link()
    alone = agent is not None and not agent.is_training
    return None if alone else runtime.current().private_comm(0, what)


def end_with_job(optimizer: RestartableOptimizer) -> None:
    """In an elastic job: what ranks wait for in it ends with their world; local. Does not keep the
    optimizer.
    """
    if link() is None:
        return
    weak = weakref.WeakMethod(optimizer.abort)

    def abort() -> None:
        if (found := weak()) is not None:
            found()

    runtime.current().on_abort.append(abort)
