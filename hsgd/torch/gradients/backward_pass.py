"""BackwardPass: detects from parameter hooks when a backward pass begins and ends.

Several watchers of a pass are called in their order of construction, which is the same on all
ranks. A pass inside another one (checkpointing with use_reentrant=True) counts as part of it.
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
_watching: list[BackwardPass] = []  # watchers of running passes


class BackwardPass:
    """Watches backward passes of autograd.

    Hooks call `wake` while `due`. `ended` is called before backward() returns, which raises its
    errors.
    """

    def __init__(self, wake: Callable[[Tensor], None], ended: Callable[[], None]) -> None:
        self.due = True
        """Whether the next hook calls `wake`; always true before the first hook of a pass."""
        self._wake, self._ended = wake, ended
        self._number = next(_numbers)
        self._open: object | None = None
        self._task = -1

    def begin(self) -> bool:
        """Clear `due`, and watch the current pass; return whether it is new; local."""
        self.due = False
        if self._open is not None:
            return False
        self._queue()
        return True

    def reset(self) -> None:
        """Stop watching: a pass that failed inside another may never end; local."""
        if self in _watching:
            _watching.remove(self)
        self._open, self.due = None, True

    def hook(self, append: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return a fast hook that calls `wake` if due, then `append`."""

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
        """Continue in the outer pass, after its `node` in which the inner pass ran."""
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
        if not handles:  # no node follows: step() ends the round
            self.reset()


class _End:
    """Callback of autograd at the end of a pass; dropped without a call if the pass fails."""

    def __init__(self, owner: BackwardPass, token: object) -> None:
        self._owner, self._token = owner, token

    def __call__(self) -> None:
        if self._owner._open is not self._token:
            return  # the first callback of this pass has called all watchers
        task = self._owner._task
        together = [each for each in _watching if each._task == task]
        for each in sorted(together, key=lambda each: each._number):
            each._leave()

    def __del__(self) -> None:
        if self._owner._open is self._token:
            self._owner.reset()


def hook_leaf(parameter: Tensor, call: Callable[[Tensor], None]) -> Any:
    """Call `call` after each accumulation into parameter.grad; return the handle.

    It also works while the parameter is frozen: torch keeps such hooks, but does not register them.
    Returns None for dtypes that never have gradients.
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
