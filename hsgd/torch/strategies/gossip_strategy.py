"""strategy="gossip": from the job's ranks to hsgd.optim.Gossip.

Owns the translation of Horovod's arguments. Never moves data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from hsgd.optim.gossip.gossip_optimizer import Gossip
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.job.process_sets import ProcessSet
from hsgd.torch.strategies.arguments import wire_of
from hsgd.torch.strategies.elastic_ranks import end_with_job, ranks_of_job

__all__ = ["start_gossip"]

_WIRE = {Compression.none: None, Compression.fp16: "float16", Compression.bf16: "bfloat16"}


def start_gossip(
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
) -> Gossip:
    """The optimizer of DistributedOptimizer(strategy="gossip"); collective, blocking. In an elastic
    job, before the function of elastic.run, local: the state that it is given to brings it together
    with the other ranks.

    model: its floating buffers are averaged too; None: the optimizer's parameters alone.
    named_parameters: not needed. options: arguments of hsgd.optim.Gossip, such as trigger and
    topology.
    Raises ValueError naming arguments that have no meaning with this strategy.
    """
    wire = wire_of(
        strategy, _WIRE, op=op, compression=compression, process_set=process_set, others=others
    )
    arguments = {"compression": wire, **(options or {})}
    if model is not None:
        arguments.setdefault("buffers", [b for b in model.buffers() if b.is_floating_point()])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    comm = ranks_of_job("gossip")
    made = Gossip(optimizer, parameters, comm, **arguments)
    end_with_job(made)
    return made
