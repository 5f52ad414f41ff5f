"""What versions of torch have differently; docs/internals/distributed.md says which were tested.

Owns these differences, each found by what a torch has, never by its number.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import torch
from hsgd.errors import LaunchError

__all__ = ["blocking_returns_none", "gloo_device", "is_blocking", "make_blocking", "refuse_old"]

# Whether torch.distributed says of each collective if it blocks, and takes None for one that does
# and is done; before, it waits for whatever is returned.
blocking_returns_none = hasattr(AllreduceOptions, "asyncOp")


def refuse_old() -> None:
    """Raise LaunchError before torch 2.7: it drops a Work written in Python while C++ waits for it,
    and functional collectives then wait for ever. `shutdown` came with the mend. Local.
    """
    if not hasattr(dist.ProcessGroup, "shutdown"):
        raise LaunchError(
            f"process groups of hsgd need torch 2.7 or newer, and this is {torch.__version__}; "
            "hsgd.torch works with 2.4"
        )


def is_blocking(options: Any) -> bool:
    """Whether a collective is to have ended when its call returns; local."""
    return options is not None and not getattr(options, "asyncOp", True)


def make_blocking(options: Any) -> None:
    """Have a collective end before its call returns, where torch can ask for that; local."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False


def gloo_device(hostname: str = "") -> Any:
    """An address of gloo that connects two ranks at their first message, where torch knows that,
    and else all when the group is made; local. hostname: none lets gloo look for one.
    """
    gloo: Any = dist.ProcessGroupGloo
    create = gloo.create_device if hostname else gloo.create_default_device
    where = {"hostname": hostname} if hostname else {}
    try:
        return create(**where, lazy_init=True)
    except TypeError:
        return create(**where)
