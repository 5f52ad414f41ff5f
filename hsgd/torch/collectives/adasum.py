"""Adasum, which is Horovod's own.

Owns the checks that come before Horovod is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hsgd.torch.collectives.submission import take_over
from hsgd.torch.job import horovod_path, runtime
from hsgd.torch.job.process_sets import ProcessSet, global_process_set

__all__ = ["start"]


def start(call: Callable[[Any], Any], process_set: ProcessSet) -> int:
    """A handle of an Adasum reduction that `call` starts, given horovod.torch.

    Raises NotImplementedError for process sets and for numbers of ranks that are no power of two,
    MissingExtra without Horovod.
    """
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if runtime.current().comm.size.bit_count() != 1:
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    return take_over(call(horovod_path.usable("Adasum")))
