"""BackwardPass: when a backward pass of autograd begins and ends, seen from hooks of parameters.

Owns the callback that autograd makes at the end of a pass, and the order in which several watchers
of one pass hear of it: that in which they were made, which is the same on all ranks. A pass inside
another one (checkpointing with use_reentrant=True) counts as part of that. Never looks at
gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["BackwardPass", "hook_leaf"]

_engine: Any = torch.autograd.Variable._execution_engine
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_numbers = itertools.count()
_watching: list[BackwardPass] = []  # those of passes that run now


class BackwardPass:
    """wake: called by hooks with their parameter while `due`. ended: called when backward() is
    about to return; what it raises, backward() raises.
    """

    def __init__(self, wake: Callable[[Tensor], None], ended: Callable[[], None]) -> None:
        self.due = True
        """Whether the next hook is to call `wake`. Always before the first one of a pass."""
        self._wake, self._ended = wake, ended
        self._number = next(_numbers)
        self._open: object | None = None
        self._task = -1

    def begin(self) -> bool:
        """Return whether the pass that the caller's hook runs in is new, and from now on watched;
        local.

        `due` is over.
        """
        self.due = False
        if self._open is not None:
            return False
        self._queue()
        return True

    def reset(self) -> None:
        """Wait for no pass any more: one that failed inside another may never have ended; local."""
        if self in _watching:
            _watching.remove(self)
        self._open, self.due = None, True

    def hook(self, append: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return a short hook: `wake` if due, then `append`."""

        def hook(parameter: Tensor) -> None:
            if self.due:
                self._wake(parameter)
            append(parameter)

        return hook

    def _queue(self) -> None:
        self._open = token = object()
        self._task = _current_task()
        _watching.append(self)
        _engine.queue_callback(_End(self, token))

    def _leave(self) -> None:
        node = _current_node()
        self.reset()
        if node is not None:
            self._follow_outer(node)
        else:
            self._ended()

    def _follow_outer(self, node: Any) -> None:
        """The pass ran inside `node` of another pass, which goes on with the nodes after it."""
        self._open = token = object()
        self.due = False
        handles: list[Any] = []

        def requeue(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            if self._open is token:
                self._queue()

        following = [after for after, _ in node.next_functions if after is not None]
        handles += [after.register_prehook(requeue) for after in following]
        if not handles:  # nothing comes after it: step() ends the round
            self.reset()


class _End:
    """What autograd calls at the end of a pass, and drops without a call if the pass fails."""

    def __init__(self, owner: BackwardPass, token: object) -> None:
        self._owner, self._token = owner, token

    def __call__(self) -> None:
        if self._owner._open is not self._token:
            return  # the first of this pass has told all
        task = self._owner._task
        together = [each for each in _watching if each._task == task]
        for each in sorted(together, key=lambda each: each._number):
            each._leave()

    def __del__(self) -> None:
        if self._owner._open is self._token:
            self._owner.reset()


def hook_leaf(parameter: Tensor, call: Callable[[Tensor], None]) -> Any:
    """Call after each accumulation into parameter.grad, also in times when the parameter is frozen
    now: torch keeps such hooks, but takes none. None for dtypes that never have gradients.
    """
    register: Callable[..., Any] = parameter.register_post_accumulate_grad_hook
    if parameter.requires_grad:
        return register(call)
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    parameter.requires_grad_(True)
    try:
        return register(call)
    finally:
        parameter.requires_grad_(False)
