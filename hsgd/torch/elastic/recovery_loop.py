"""run: goes back to the last commit when a rank is lost, and on with those that are there then.

Owns the loop. Who is there is the agent's to say, which `hsgd run --min-np` starts
(hsgd.jobs.elastic). Without one the ranks stay the same: an error that leaves all of them alive is
survived, too.
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
    """Decorate a function for elastic training, as Horovod does: call `func(state, ...)` until it
    returns.

    func: trains from where `state` is, and calls state.commit() now and then. state: a State; it
    is sent from rank 0 to all ranks before each call (collective).
    When a collective fails because a rank was lost (HorovodInternalError, PeerLost,
    CollectiveTimeout), the ranks that are left restore their last commit, form a new job and call
    `func` again; when ranks wait to join (HostsUpdatedInterrupt, out of commit()), so do all, with
    the state of now. Other exceptions end this rank. Raises LaunchError when the agent is gone.
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
        if agent is not None:  # after on_reset(), in which the state forgets what it heard
            agent.listen(lambda world: state.on_hosts_updated(world, _ADDED_AND_REMOVED))
        try:
            if not skip_sync:
                state.sync()
                state.save()  # or a new rank would restore what it began with
            if agent is not None:
                agent.hold()
            return call()
        except (HorovodInternalError, HsgdError) as lost:
            if not _is_lost(lost, agent):
                raise
            if agent is not None:  # first: the others may think that it hangs
                _leave(agent, lost)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as update:
            if agent is not None:
                agent.leave(None)
            # In another world the state has optimizers that get their ranks in sync().
            skip_sync = update.skip_sync and agent is None
        basics.shutdown()
        basics.init()
        state.on_reset()


def _is_lost(error: Exception, agent: AgentLink | None) -> bool:
    """Whether a rank of the job is. An HsgdError itself is what abort() ends calls with."""
    kinds = (HorovodInternalError, PeerLost, CollectiveTimeout)
    return isinstance(error, kinds) or (agent is not None and type(error) is HsgdError)


def _leave(agent: AgentLink, lost: Exception) -> None:
    job = runtime.latest()
    # Process sets number their ranks anew.
    agent.leave(lost, is_of_world=job is not None and len(job.process_sets()) == 1)
    if job is not None:
        job.abort()  # else shutdown() waits for what is open
