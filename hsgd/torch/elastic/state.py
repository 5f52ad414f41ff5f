"""States of elastic training, which are saved in memory, restored, and sent to new ranks."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hsgd.optim.restartable_optimizer import RestartableOptimizer
from hsgd.torch.elastic.sampler import ElasticSampler
from hsgd.torch.exceptions import HostsUpdatedInterrupt
from hsgd.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hsgd.torch.job import runtime

__all__ = [
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_REMOVED = 1  # Horovod's HostUpdateResult: only removed hosts


class State:
    """The interface that elastic.run uses; `bcast_object` sends an object from rank 0."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Add functions to call after ranks came or went."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset the state and call the callbacks, after ranks came or went."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record a message from the driver that hosts changed."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and check for new hosts; collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 knows of new hosts; collective."""
        last = previous = self._last_updated_timestamp
        updates = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > last:
                last = timestamp
                updates |= update
        received = self._bcast_object((previous, last, updates))
        previous, self._last_updated_timestamp, updates = received
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(updates == _REMOVED)

    def save(self) -> None:
        """Keep the current values in memory; local."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved values; local."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's values to all ranks; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for sync() in on_reset(); local."""


class ObjectState(State):
    """A state of Python objects, which are its attributes; copies are by reference."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and other objects, which are its attributes."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        named = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {name: _handler(value) for name, value in named.items()}
        self._handlers = {
            name: handler for name, handler in handlers.items() if handler is not None
        }
        for name, handler in self._handlers.items():
            setattr(self, name, handler.value)
        others = {name: value for name, value in named.items() if name not in self._handlers}
        super().__init__(broadcast_object, lambda: runtime.current().comm.rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        # First, since Gossip's ranks make one model of their different weights.
        for handler in sorted(
            self._handlers.values(), key=lambda one: not isinstance(one, LocalTrainingStateHandler)
        ):
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name) and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and sends one object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's value; collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles an object with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles a torch.nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Handles a torch.optim.Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)


class LocalTrainingStateHandler(_StateDictHandler):
    """Handles a DiLoCo or Gossip; restart() decides where its ranks continue.

    Each rank keeps the state of its inner optimizer. save() is local, but waits for exchanges.
    """

    def save(self) -> None:
        super().save()
        self._goes_back = False

    def restore(self) -> None:
        """Abort waits for this rank now; sync() restores, with the remaining ranks."""
        self.value.abort()
        self._goes_back = True

    def sync(self) -> None:
        back = copy.deepcopy(self._saved) if self._goes_back else None
        job = runtime.current()
        self.value.restart(job.private_comm(0, "optimizer"), back)
        job.on_abort.append(self.value.abort)
        self._goes_back = False
        groups = self.value.param_groups
        own = [{name: group[name] for name in group if name != "params"} for group in groups]
        for group, given in zip(groups, broadcast_object(own), strict=True):
            group.update(given)  # such as a learning rate that has decayed


class SamplerStateHandler(_StateDictHandler):
    """Handles an ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (RestartableOptimizer, LocalTrainingStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of class and handler; the first match is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry of handlers."""
    _registry[:] = registry


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
