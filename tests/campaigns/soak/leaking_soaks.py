"""Programs that leak, for each kind of measure one: a judge that lets them pass proves nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from campaigns.soak.soak_rank import Post

__all__ = ["descriptors", "memory", "threads"]


def _run(post: Post, each: Callable[[], object], last: Callable[[], object]) -> None:
    """last: done once, before the last tenth."""
    done = 0
    for todo in post.blocks():
        for _ in range(todo):
            each()
            done += 1
            if done == post.count * 3 // 4:
                last()


def memory(post: Post) -> None:
    """A page each time."""
    kept: list[bytes] = []
    _run(post, lambda: kept.append(b"x" * (4096 + len(kept) % 2)), lambda: None)


def descriptors(post: Post) -> None:
    """One in the end."""
    kept: list[int] = []
    _run(post, lambda: None, lambda: kept.append(os.open("/dev/null", os.O_RDONLY)))
    os.close(kept[0])


def threads(post: Post) -> None:
    """One in the end."""
    over = threading.Event()
    _run(post, lambda: None, threading.Thread(target=over.wait).start)
    over.set()
