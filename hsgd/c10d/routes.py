"""Routes of a method call, by its arguments: the core, the method, or another device's group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from hsgd.c10d import overloads
from hsgd.c10d.diagnostics import tracing
from hsgd.c10d.work import HsgdWork

if TYPE_CHECKING:
    from hsgd.c10d.collectives import Collectives

__all__ = ["at_once", "by_device"]

_REAL = (Tensor, torch.nn.Parameter, type(None))
Method = TypeVar("Method", bound=Callable[..., Any])


def _first_tensor(arguments: Sequence[Any]) -> Tensor | None:
    for each in arguments:
        if isinstance(each, Tensor):
            return each
        if isinstance(each, list | tuple) and (found := _first_tensor(each)) is not None:
            return found
    return None


def by_device(method: Method) -> Method:
    """Accept all forms of the arguments, and pass tensors of other devices to their group."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Collectives, *given: Any, **named: Any) -> Any:
        arguments = overloads.usual(name, given, named)
        tensor = _first_tensor(arguments)
        if tensor is None or tensor.device.type == self._device_type:
            is_fake = type(tensor) not in _REAL and hasattr(tensor, "fake_mode")
            return self.pretend(name) if is_fake else method(self, *arguments)
        other = self.group_for(tensor.device, name)
        return getattr(other, name)(*arguments)

    return cast(Method, call)


def at_once(native: str, arguments: int, what: str) -> Callable[[Method], Method]:
    """Pass calls with one plain tensor directly to the core.

    A blocking call returns None, as NCCL's do, if torch.distributed expects it; the core's queue
    runs an asynchronous one.

    Args:
        native: method of the binding's Comm; it returns False for calls that are not that simple.
        arguments: number of arguments of such a call.
        what: name of the collective in errors.
    """

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Collectives, *given: Any, **named: Any) -> Any:
            comm = self._comm
            is_usual = len(given) == arguments and not named and comm is not None
            if not is_usual or tracing.is_on() or not self._is_unwatched():
                return method(self, *given, **named)
            taken = getattr(comm._native, native)(*given)
            if taken is None:
                return None
            if taken is False:
                return method(self, *given)
            output = given[0]
            tensors = output if isinstance(output, list) else [output]
            return HsgdWork(what, tensors, comm, request=taken)

        return cast(Method, call)

    return decorated
