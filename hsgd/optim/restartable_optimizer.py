"""RestartableOptimizer: the base of optimizers that continue after ranks came or went."""

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
    """Wraps an optimizer, which keeps groups and state; a subclass sets `_ranks`."""

    _ranks: OptimizerRanks

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._waits_for_ranks = True
        self._left = False  # the communicator that the user gave was closed
        self._aborted = False

    def abort(self) -> None:
        """Fail collectives that wait for this rank; local, never blocks, from any thread."""
        self._aborted = True
        self._ranks.abort()

    @abc.abstractmethod
    def restart(self, comm: Any, state_dict: dict[str, Any] | None = None) -> None:
        """Continue with the ranks of another communicator; collective over it, blocking.

        `state_dict` is a copy of what this rank's state_dict() returned; it is loaded first.
        """

    @abc.abstractmethod
    def _leave(self, abort: bool) -> None:
        """Close all resources; with `abort`, without any rank waiting for another."""

    def _share_inner_state(self, group: Comm | None, steps: int) -> None:
        """Copy the inner state within a group of ranks; collective, blocking.

        The source is the lowest rank with the most steps. The ranks of a group step on equal
        gradients; `group` is None on ranks outside of groups.
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
        self._waits_for_ranks = True
        self._leave(abort=True)

    @property
    def _comm(self) -> Comm:
        """The communicator of all ranks; raises ClosedError if there are no ranks."""
        self._check_ranks()
        return self._ranks.comm

    def _check_open(self) -> None:
        self._check_not_closed()
        self._check_ranks()

    def _check_ranks(self) -> None:
        name = type(self).__name__
        if self._left:
            raise ClosedError(
                f"{name}: its communicator was closed, by hvd.shutdown() for instance; make a new "
                "one, or call restart(comm), after hvd.init()"
            )
        if self._waits_for_ranks:
            self._check_not_closed()  # a with block that raised has closed it
            raise ClosedError(
                f"{name}: it has no ranks, since it was made without, or restart() failed; call "
                "restart(comm), or give it to hvd.elastic.TorchState(model, optimizer)"
            )
