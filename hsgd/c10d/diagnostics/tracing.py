"""Ranges for torch.profiler: one for each collective of a process group, and one for each wait.

Names are like "hsgd:all_reduce" and "hsgd:all_reduce wait", after gloo's "gloo:all_reduce". The
range of a collective begins in the calling thread and ends when it is done; a wait is the time that
the caller spends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled, _record_function_with_args_enter
from torch.profiler import record_function

from hsgd.c10d import NAME

__all__ = ["UNTRACED", "begin", "end", "is_on", "waiting"]

is_on = _profiler_enabled  # a profiler runs in this thread; local
UNTRACED = contextlib.nullcontext()


def begin(backend: str, what: str, tensors: Iterable[torch.Tensor]) -> Any:
    """Begin a collective's range, with shapes; None if no profiler runs in this thread; local."""
    if not _profiler_enabled():
        return None
    ended: Any = torch.futures.Future()
    record = _record_function_with_args_enter(f"{backend}:{what}", *tensors)
    # Ends the range with the profiler's state of this thread, in any thread.
    torch.ops.profiler._call_end_callbacks_on_jit_fut(record, ended)
    return ended


def end(begun: Any) -> None:
    """End a range of begin(), in any thread; local."""
    begun.set_result(None)


def waiting(what: str) -> AbstractContextManager[Any]:
    """Return a context that a profile of this thread shows; cheap without a profiler."""
    if not _profiler_enabled():
        return UNTRACED
    return record_function(f"{NAME}:{what} wait")
