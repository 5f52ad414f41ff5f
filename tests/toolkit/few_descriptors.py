"""few_descriptors(): a rank that has no descriptors left, for a while."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["few_descriptors"]

_ROOM = 200  # for the tests that follow in this process


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leave this process about `free` descriptors, and no soft limit that could be raised.

    Only root could raise the hard limit again, so it stays low: others are held meanwhile.
    """
    taken = [os.dup(0) for _ in range(_ROOM)]
    most = max(int(descriptor) for descriptor in os.listdir("/proc/self/fd")) + 1 + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
