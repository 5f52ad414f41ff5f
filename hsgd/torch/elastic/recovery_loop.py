"""run: restores the last commit if a rank is lost, and continues with the present ranks.

The agent that `hsgd run --min-np` starts (hsgd.jobs.elastic) decides which ranks these are. Without
an agent they stay the same, and only errors that leave all ranks alive are survived.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hsgd.errors import CollectiveTimeout, HsgdError, PeerLost
from hsgd.jobs.environment.agent_link import AgentLink, link
from hsgd.torch.elastic.state import State
from hsgd.torch.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from hsgd.torch.job import basics, runtime

__all__ = ["run"]

Result = TypeVar("Result")
_ADDED_AND_REMOVED = 3  # Horovod's HostUpdateResult: the state has to be sent


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function for elastic training: call `func(state, ...)` until it returns.

    `func` trains from `state` and calls state.commit() from time to time. Before each call `state`
    is sent from rank 0 to all ranks (collective).

    If a collective fails because a rank was lost (HorovodInternalError, PeerLost,
    CollectiveTimeout), the remaining ranks restore their last commit, form a new job and call
    `func` again. If ranks wait to join (HostsUpdatedInterrupt, from commit()), all form a new job
    with the current state. Other exceptions end this rank. Raises LaunchError if the agent is gone.
    """

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> Result:
        agent = link()
        try:
            return _train(agent, state, lambda: func(state, *args, **kwargs))
        finally:
            if agent is not None:
                agent.listen(None)

    return wrapped


def _train(agent: AgentLink | None, state: State, call: Callable[[], Result]) -> Result:
    skip_sync = False
    while True:
        if agent is not None:  # after on_reset(), which clears the state's messages
            agent.listen(lambda world: state.on_hosts_updated(world, _ADDED_AND_REMOVED))
        try:
            if not skip_sync:
                state.sync()
                state.save()  # else a new rank would restore its initial values
            if agent is not None:
                agent.hold()
            return call()
        except (HorovodInternalError, HsgdError) as lost:
            if not _is_lost(lost, agent):
                raise
            if agent is not None:  # first, else other ranks may assume that this one hangs
                _leave(agent, lost)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as update:
            if agent is not None:
                agent.leave(None)
            # In a new world, sync() gives the state's optimizers their ranks.
            skip_sync = update.skip_sync and agent is None
        basics.shutdown()
        basics.init()
        state.on_reset()


def _is_lost(error: Exception, agent: AgentLink | None) -> bool:
    """Return whether a rank is lost; abort() ends calls with a plain HsgdError."""
    kinds = (HorovodInternalError, PeerLost, CollectiveTimeout)
    return isinstance(error, kinds) or (agent is not None and type(error) is HsgdError)


def _leave(agent: AgentLink, lost: Exception) -> None:
    job = runtime.latest()
    # Process sets renumber their ranks.
    agent.leave(lost, is_of_world=job is not None and len(job.process_sets()) == 1)
    if job is not None:
        job.abort()  # else shutdown() waits for open operations
