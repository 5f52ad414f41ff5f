"""BackwardPass: when a backward pass of autograd begins and ends, seen from hooks of parameters.

Owns the callback that autograd makes at the end of a pass. A pass inside another one (checkpointing
with use_reentrant=True) counts as part of that. Never looks at gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["BackwardPass", "hook_leaf"]

_engine: Any = torch.autograd.Variable._execution_engine
_current_node: Callable[[], Any] = torch._C._current_autograd_node


class BackwardPass:
    """wake: called by hooks with their parameter while `due`. ended: called when backward() is
    about to return; what it raises, backward() raises.
    """

    def __init__(self, wake: Callable[[Tensor], None], ended: Callable[[], None]) -> None:
        self.due = True
        """Whether the next hook is to call `wake`. Always before the first one of a pass."""
        self._wake, self._ended = wake, ended
        self._open: object | None = None

    def begin(self) -> bool:
        """Whether the pass that the caller's hook runs in is new, and from now on watched; local.
        `due` is over.
        """
        self.due = False
        if self._open is not None:
            return False
        self._queue()
        return True

    def hook(self, append: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """A short hook: `wake` if due, then `append`."""

        def hook(parameter: Tensor) -> None:
            if self.due:
                self._wake(parameter)
            append(parameter)

        return hook

    def _queue(self) -> None:
        token = object()
        self._open = token
        _engine.queue_callback(_End(self, token))

    def _leave(self, token: object, *, completed: bool) -> None:
        if self._open is not token:
            return
        node = _current_node() if completed else None
        if node is not None:
            self._follow_outer(node)
            return
        self._open, self.due = None, True
        if completed:
            self._ended()

    def _follow_outer(self, node: Any) -> None:
        """The pass ran inside `node` of another pass, which goes on with the nodes after it."""
        token = object()
        self._open = token
        handles: list[Any] = []

        def requeue(*_: Any) -> None:
            for handle in handles:
                handle.remove()
            if self._open is token:
                self._queue()

        following = [after for after, _ in node.next_functions if after is not None]
        handles += [after.register_prehook(requeue) for after in following]
        if not handles:  # nothing comes after it: step() ends the round
            self._open, self.due = None, True


class _End:
    """What autograd calls at the end of a pass, and drops without a call if the pass fails."""

    def __init__(self, owner: BackwardPass, token: object) -> None:
        self._owner, self._token = owner, token

    def __call__(self) -> None:
        self._owner._leave(self._token, completed=True)

    def __del__(self) -> None:
        self._owner._leave(self._token, completed=False)


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
