"""Arguments of Horovod's DistributedOptimizer, as the strategies of hsgd.optim take them.

Owns the translation. Never judges: the strategies refuse what has no meaning for them.
"""

from __future__ import annotations

from typing import Any

from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.process_sets import ProcessSet, global_process_set
from hsgd.torch.reductions import AVERAGE

__all__ = ["translated"]


def translated(
    op: int, *, compression: type[Compressor], process_set: ProcessSet, **others: Any
) -> dict[str, Any]:
    """`others`, op as text, and of compression and process_set what is not the default; local."""
    given = {**others, "op": "mean" if op == AVERAGE else str(op)}
    if compression is not Compression.none:
        given["compression"] = compression
    if process_set is not global_process_set:
        given["process_set"] = process_set
    return given
