"""Arguments of Horovod's DistributedOptimizer, as strategies take them.

Owns the translation, and the words for arguments that have no meaning with a strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.job.process_sets import ProcessSet, global_process_set
from hsgd.torch.operations.reductions import AVERAGE

__all__ = ["WITH_OPTIONS", "refuse_options", "refuse_others", "translated", "wire_of"]

WITH_OPTIONS = ("gossip", "diloco", "easgd_async", "easgd_hybrid")

# Arguments of DistributedOptimizer, and the values with which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "backward_passes_per_step": (1, None),
    "gradient_predivide_factor": (1.0, 1, None),
    "num_groups": (0, None),
    "groups": (None,),
    "sparse_as_dense": (False, None),
    "process_set": (None,),
    "node_shared": (False, None),
}


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


def wire_of(
    strategy: str,
    wires: Mapping[type[Compressor], str | None],
    *,
    op: int,
    compression: type[Compressor],
    process_set: ProcessSet,
    others: dict[str, Any],
) -> str | None:
    """What a strategy that averages weights sends them as, by its `wires`; local. Raises ValueError
    for arguments that it cannot follow, `others` among them.
    """
    if op != AVERAGE:
        raise ValueError(f'strategy="{strategy}" averages; op is {op}, give Average')
    if process_set is not global_process_set:
        others["process_set"] = process_set
    if compression not in wires:
        others["compression"] = compression
    refuse_others(strategy, others)
    return wires[compression]


def refuse_options(strategy: str, options: Mapping[str, Any] | None) -> None:
    """Raise ValueError where strategy_options are given to a strategy that has none."""
    if options is not None:
        raise ValueError(
            f'strategy_options are for {", ".join(WITH_OPTIONS)}; strategy is "{strategy}"'
        )


def refuse_others(strategy: str, others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that this strategy cannot follow; neutral values pass."""
    for name, value in others.items():
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            remedy = "leave it out"
            if strategy == "notified_tree" and name == "backward_passes_per_step":
                remedy = "use no_sync()"
            raise ValueError(
                f'strategy="{strategy}" does not know {name}={value!r}; {remedy}, or use '
                "another strategy"
            )
