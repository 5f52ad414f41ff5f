"""strategy="diloco": from the job's ranks to hsgd.optim.DiLoCo.

Owns the translation of Horovod's arguments. Never moves data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hsgd.optim.diloco.diloco_optimizer import DiLoCo
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.job.process_sets import ProcessSet
from hsgd.torch.strategies.arguments import wire_of
from hsgd.torch.strategies.elastic_ranks import end_with_job, ranks_of_job

__all__ = ["start_diloco"]

_WIRE = {Compression.none: None, Compression.bf16: "bfloat16"}


def start_diloco(
    optimizer: torch.optim.Optimizer,
    strategy: str,
    *,
    op: int,
    model: torch.nn.Module | None,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    options: Mapping[str, Any] | None,
    compression: type[Compressor],
    process_set: ProcessSet,
    **others: Any,
) -> DiLoCo:
    """The optimizer of DistributedOptimizer(strategy="diloco"); collective, blocking. In an elastic
    job, before the function of elastic.run, local: the state that it is given to brings it together
    with the other ranks.

    model: its floating buffers are averaged too; None: the optimizer's parameters alone.
    named_parameters: not needed. options: arguments of hsgd.optim.DiLoCo, such as sync_every.
    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    wire = wire_of(
        strategy, _WIRE, op=op, compression=compression, process_set=process_set, others=others
    )
    arguments = {"compression": wire, **(options or {})}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    comm = ranks_of_job("diloco")
    made = DiLoCo(optimizer, own if model is None else model, comm, **arguments)
    end_with_job(made)
    return made
