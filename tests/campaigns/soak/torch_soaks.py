"""Programs of ranks over torch.distributed, on the backend "hsgd"."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import hsgd.c10d
from campaigns.soak.soak_rank import Post

__all__ = ["groups", "works"]


def _join(post: Post) -> None:
    hsgd.c10d.register()
    if len(set(post.nodes)) > 1:
        post.pretend_nodes()
    dist.init_process_group(
        "hsgd",
        store=post.store(),
        rank=post.rank,
        world_size=post.size,
        timeout=timedelta(seconds=120),
    )


def _check(found: torch.Tensor, wanted: float) -> None:
    if not bool((found == wanted).all()):
        raise AssertionError(f"{found.flatten()[:4].tolist()}, not {wanted}")


def works(post: Post) -> None:
    """Eight at a time; every other one is waited for, the rest by the last of them."""
    _join(post)
    wanted = float(sum(range(post.size)))
    for todo in post.blocks():
        for left in range(todo, 0, -8):
            given = [torch.full((16,), float(post.rank)) for _ in range(min(8, left))]
            started: list[Any] = [dist.all_reduce(each, async_op=True) for each in given]
            for work in [*started[::2], started[-1]]:
                work.wait()
            _check(given[-1], wanted)
    dist.destroy_process_group()


def groups(post: Post) -> None:
    """Of all ranks, used once and destroyed, one after the other."""
    _join(post)
    for todo in post.blocks():
        for _ in range(todo):
            group: Any = dist.new_group(list(range(post.size)))
            given = torch.full((16,), float(post.rank))
            dist.all_reduce(given, group=group)
            _check(given, float(sum(range(post.size))))
            dist.destroy_process_group(group)
    dist.destroy_process_group()
