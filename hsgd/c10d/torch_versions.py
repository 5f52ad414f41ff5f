"""Differences between versions of torch, found by features, never by version numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from hsgd.errors import LaunchError

__all__ = ["blocking_returns_none", "gloo_device", "is_blocking", "make_blocking", "refuse_old"]

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
