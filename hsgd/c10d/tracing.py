"""What torch.profiler sees of the backend: a range for each call, and one for each wait.

Owns the names, "hsgd:all_reduce" and "hsgd:all_reduce wait", after gloo's "gloo:all_reduce". torch
profiles the threads of the program only, so a range is what the caller spends: a blocking call
whole, an asynchronous one until it is handed over.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from hsgd.c10d import NAME

__all__ = ["traced"]

_UNTRACED = contextlib.nullcontext()


def traced(what: str) -> AbstractContextManager[Any]:
    """A context that shows in a profile of this thread; costs little where there is none."""
    if not _profiler_enabled():
        return _UNTRACED
    return record_function(f"{NAME}:{what}")
