"""Differences between versions of torch, found by features, never by version numbers."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from hsgd.errors import LaunchError

__all__ = [
    "blocking_returns_none",
    "gloo_device",
    "is_blocking",
    "keep_from_dynamo",
    "make_blocking",
    "refuse_old",
]

_Class = TypeVar("_Class", bound=type)

# If torch.distributed states for each collective whether it blocks, and accepts None for a finished
# one. Older versions wait for any returned work.
blocking_returns_none = hasattr(AllreduceOptions, "asyncOp")


def refuse_old() -> None:
    """Raise LaunchError before torch 2.7, which drops Python's Works while C++ waits; local."""
    if not hasattr(dist.ProcessGroup, "shutdown"):
        raise LaunchError(
            f"process groups of hsgd need torch 2.7 or newer, and this is {torch.__version__}; "
            "hsgd.torch works with 2.4"
        )


def keep_from_dynamo(kind: _Class) -> _Class:
    """Decorate a class whose methods, and what they call, torch.compile runs without compiling.

    It leaves torch's own functions alone, but would compile what those call, and refuses process
    groups there. Does not import torch._dynamo.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for value in vars(kind).values():
        function = getattr(value, "fget", value)
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, skip)
    return kind


def is_blocking(options: Any) -> bool:
    """Return whether a collective must have ended when its call returns; local."""
    return options is not None and not getattr(options, "asyncOp", True)


def make_blocking(options: Any) -> None:
    """Make a collective end before its call returns, if torch supports that; local."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False


def gloo_device(hostname: str = "") -> Any:
    """Return a gloo device that connects at the first message, if this torch can; local."""
    gloo: Any = dist.ProcessGroupGloo
    create = gloo.create_device if hostname else gloo.create_default_device
    where = {"hostname": hostname} if hostname else {}
    try:
        return create(**where, lazy_init=True)
    except TypeError:
        return create(**where)
