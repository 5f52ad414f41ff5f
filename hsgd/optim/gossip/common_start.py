"""Where the ranks of a Gossip begin together: at first, and after some were lost or have joined.

Owns whose weights count. Never forms pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hsgd.comm import Comm
from hsgd.optim.flat_vectors import at_least_float32

__all__ = ["Start", "start_together"]


class Start(NamedTuple):
    """What is alike on all ranks then."""

    steps: int
    rounds: int
    velocity: list[Tensor] | None
    """Of outer steps; None: no rank has any."""
    source: int | None
    """The lowest rank that had taken steps, where another one had not; else None."""


def start_together(
    comm: Comm,
    steps: int,
    rounds: int,
    velocity: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    others: Sequence[Tensor],
) -> Start:
    """Make weights, and other vectors such as buffers, those of rank 0 where no rank has taken
    steps; else the mean over those that have, and whose vectors are finite; collective, blocking.
    Where it raises, vectors are as they were, or are that mean already.

    steps, rounds: that this rank has taken. velocity: what it has, as many vectors as weights.
    """
    own = [*weights, *others]
    counts = steps > 0 and _finite(own)
    moves = counts and velocity is not None and _finite(velocity)
    mine = np.array([steps, rounds, moves, counts], np.int64)
    every = comm.allgather(mine, name="steps of Gossip").reshape(comm.size, len(mine))
    older, counting = np.flatnonzero(every[:, 0]), every[:, 3]
    if counting.any():
        means = [_mean_of(comm, vector, counting) for vector in own]
        for vector, mean in zip(own, means, strict=True):
            vector.copy_(mean)
    else:
        root = int(older[0]) if len(older) else 0
        for vector in own:
            comm.broadcast(vector, root, name="weights of Gossip")
    found = None
    if every[:, 2].any():
        have = [at_least_float32(weight) for weight in weights] if velocity is None else velocity
        found = [_mean_of(comm, vector, every[:, 2]) for vector in have]
    mixed = 0 < len(older) < comm.size
    source = int(older[0]) if mixed else None
    return Start(int(every[:, 0].max()), int(every[:, 1].max()), found, source)


def _finite(vectors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(vector).all()) for vector in vectors)


def _mean_of(comm: Comm, vector: Tensor, counting: np.ndarray) -> Tensor:
    """The mean over the ranks that count, as a new vector of float32 at least."""
    whole = at_least_float32(vector)
    share = whole / int(counting.sum()) if counting[comm.rank] else torch.zeros_like(whole)
    comm.allreduce(share, "sum", out=share, name="weights of Gossip")
    return share
