"""The base of optimizers that go on with other ranks, after some were lost or have joined.

Owns whether there are ranks, and what is said where there are none. Never communicates.
"""

from __future__ import annotations

import abc
from typing import Any

from torch.optim.optimizer import Optimizer

from hsgd.comm.communicator import Comm
from hsgd.errors import ClosedError
from hsgd.optim.optimizer_ranks import OptimizerRanks
from hsgd.optim.wrapping_optimizer import WrappingOptimizer

__all__ = ["RestartableOptimizer"]


class RestartableOptimizer(WrappingOptimizer, abc.ABC):
    """Wraps an optimizer, which has the groups and the state; local. It has no ranks until its
    class has formed them, in `_ranks`.
    """

    _ranks: OptimizerRanks

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._waits_for_ranks = True
        self._left = False  # with the communicator that was given
        self._aborted = False

    def abort(self) -> None:
        """Leave the other ranks, which get an error where they wait for this one in a collective;
        local, never blocks, from any thread. restart() may follow.
        """
        self._aborted = True
        self._ranks.abort()

    @abc.abstractmethod
    def restart(self, comm: Any, state_dict: dict[str, Any] | None = None) -> None:
        """Go on with the ranks of another communicator; collective over it, blocking. state_dict: a
        copy of what this rank's state_dict() gave, to go back there first.
        """

    @abc.abstractmethod
    def _leave(self, abort: bool) -> None:
        """Close what there is. abort: wait for nobody, and let nobody wait for this rank."""

    def _share_inner_state(self, group: Comm | None, steps: int) -> None:
        """Give the ranks of a group, which step on the same gradients, the state of the wrapped
        optimizer of the lowest one that has taken the most steps; collective, blocking. group:
        None, where this rank is none of a group. steps: that this rank has taken.
        """
        if group is None:
            return
        taken = group.allgather_object(steps, "steps of the group's ranks")
        source = taken.index(max(taken))
        own = self._optimizer.state_dict()
        state = group.broadcast_object(own["state"], source, "inner state of the group")
        if group.rank != source:
            self._load_wrapped({**own, "state": state})

    def _comm_closes(self) -> None:
        self._left = True
        self._leave(abort=self._aborted or self._ranks.comm.left_by_error)

    def _abandon(self) -> None:
        self._closed = True
        self._lose_ranks()

    def _lose_ranks(self) -> None:
        """No rank waits for this one."""
        self._waits_for_ranks = True
        self._leave(abort=True)

    @property
    def _comm(self) -> Comm:
        """All ranks. Raises ClosedError where there are none."""
        self._check_ranks()
        return self._ranks.comm

    def _check_open(self) -> None:
        self._check_not_closed()
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise ClosedError where there are none."""
        name = type(self).__name__
        if self._left:
            raise ClosedError(
                f"{name}: its communicator was closed, by hvd.shutdown() for instance; make a new "
                "one, or call restart(comm), after hvd.init()"
            )
        if self._waits_for_ranks:
            self._check_not_closed()  # where a with block raised, it lost its ranks
            raise ClosedError(
                f"{name}: it has no ranks, since it was made without, or restart() failed; call "
                "restart(comm), or give it to hvd.elastic.TorchState(model, optimizer)"
            )
