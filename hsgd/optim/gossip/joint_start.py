"""start_together: the common start of the ranks of a Gossip, at first and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hsgd.comm.communicator import Comm
from hsgd.optim.flat_vectors import at_least_float32

__all__ = ["Past", "Start", "start_together"]


@dataclass(frozen=True)
class Past:
    """A rank's history."""

    steps: int = 0
    rounds: int = 0
    velocity: Sequence[Tensor] | None = None
    """Of outer steps."""
    was_in: bool = False
    """Whether it had other ranks before; a new rank may have loaded an old state."""
    has_called: bool = False
    """Whether its trigger has seen its steps."""


class Start(NamedTuple):
    """The common start, equal on all ranks."""

    steps: int
    rounds: int
    velocity: list[Tensor] | None
    """Of outer steps; None if no rank has any."""
    source: int
    """The rank whose trigger counts: the one that has called it in most steps."""
    takes: list[bool]
    """By rank: whether it takes the source's trigger."""


def start_together(
    comm: Comm, past: Past, weights: Sequence[Tensor], others: Sequence[Tensor]
) -> Start:
    """Average weights and other vectors over the ranks that count; collective, blocking.

    Ranks count if they were in before, or if no rank was, if they have taken steps; vectors that
    are not finite are left out. If none remain, all take those of the lowest rank that counts, or
    rank 0's. If it raises, each vector is either unchanged or already the common one. `past` is
    this rank's; its velocity has as many vectors as `weights`.
    """
    own = [*weights, *others]
    finite = _finite(own)
    moves = finite and past.velocity is not None and _finite(past.velocity)
    mine = [past.steps, past.rounds, past.was_in, past.has_called, finite, moves]
    every = comm.allgather(np.array(mine, np.int64), name="steps of Gossip")
    steps, rounds, was_in, called, sound, moving = every.reshape(comm.size, len(mine)).T
    older = was_in.astype(bool) if was_in.any() else steps > 0
    counting = older & sound.astype(bool)
    first = int(np.flatnonzero(older)[0]) if older.any() else 0
    if counting.any():
        means = [_mean_of(comm, vector, counting) for vector in own]
        for vector, mean in zip(own, means, strict=True):
            vector.copy_(mean)
    else:
        for vector in own:
            comm.broadcast(vector, first, name="weights of Gossip")
    if not older.any():
        return Start(0, 0, None, 0, [False] * comm.size)
    velocity, known = None, counting & moving.astype(bool)
    if known.any():
        like = [at_least_float32(weight) for weight in weights]
        have = like if past.velocity is None else past.velocity
        velocity = [_mean_of(comm, vector, known) for vector in have]
    most = int(steps[older].max())
    callers = older & called.astype(bool)
    furthest = int(steps[callers].max()) if callers.any() else 0
    sources = callers & (steps == furthest)
    source = int(np.flatnonzero(sources)[0]) if sources.any() else first
    return Start(most, int(rounds[older].max()), velocity, source, (~sources).tolist())


def _finite(vectors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(vector).all()) for vector in vectors)


def _mean_of(comm: Comm, vector: Tensor, counting: np.ndarray) -> Tensor:
    """Return the mean over the ranks that count, as a new vector of at least float32."""
    whole = at_least_float32(vector)
    share = whole / int(counting.sum()) if counting[comm.rank] else torch.zeros_like(whole)
    comm.allreduce(share, "sum", out=share, name="weights of Gossip")
    return share
