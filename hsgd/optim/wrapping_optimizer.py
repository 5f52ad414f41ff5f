"""WrappingOptimizer: the base of optimizers that wrap the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from typing_extensions import Self

from hsgd.errors import ClosedError
from hsgd.optim.worker_group import WorkerGroup

__all__ = ["WrappingOptimizer", "check_choice", "tensors_of"]


class WrappingOptimizer(Optimizer):
    """Wraps an optimizer, which keeps groups and state; a context manager that closes it."""

    loads_together: ClassVar[bool] = False
    """Whether load_state_dict() is collective, because the state is spread over several ranks."""
    _group: WorkerGroup | None = None  # ranks that train as one worker, with this one

    def __init__(self, optimizer: Optimizer) -> None:
        # Not Optimizer.__init__: groups, state and defaults are those of the wrapped one.
        self._optimizer = optimizer
        self._closed = False
        self._take_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does; local. A group zeroes them in place."""
        if self._group is not None:
            self._group.zero_gradients()
        else:
            self._optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, since the exchanged parameters are fixed at construction."""
        raise ValueError(
            f"{type(self).__name__}: parameters cannot be added; close it and make a new one"
        )

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the with block has ended."""
        return self._closed

    def close(self) -> None:
        raise NotImplementedError

    def _abandon(self) -> None:
        """Close without waiting for other ranks."""
        raise NotImplementedError

    def _check_open(self) -> None:
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} is closed")

    def _load_wrapped(self, state_dict: dict[str, Any], own: str = "") -> None:
        """Load the wrapped optimizer's state, without the wrapper's entry `own`; local."""
        self._optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != own})
        self._take_over()

    def _step_wrapped(self, closure: Callable[[], float] | None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def _take_over(self) -> None:
        self.defaults = self._optimizer.defaults
        self.param_groups = self._optimizer.param_groups
        self.state = self._optimizer.state


def tensors_of(
    params: nn.Module | Iterable[Tensor], what: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a model's trainable parameters and floating buffers, or given tensors and []; local.

    Raises TypeError, with a message that begins with `what`, for anything else.
    """
    if isinstance(params, nn.Module):
        floating = [buffer for buffer in params.buffers() if buffer.is_floating_point()]
        return [p for p in params.parameters() if p.requires_grad], floating
    found = list(params)
    if any(not isinstance(tensor, Tensor) for tensor in found):
        raise TypeError(f"{what}: params is a model, or its parameters")
    return found, []


def check_choice(what: str, given: object, choices: Iterable[object]) -> None:
    """Raise ValueError if `given` is not one of the choices."""
    known = list(choices)
    if given not in known:
        raise ValueError(f"{what} is {given!r}; use one of {', '.join(map(repr, known))}")
