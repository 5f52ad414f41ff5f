"""GossipMetrics and Scores: counters of a rank, and a figure of all models."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GossipMetrics", "Scores"]


@dataclass(frozen=True)
class GossipMetrics:
    """Counters of this rank since its start, including those of a loaded state."""

    steps: int
    triggers: int
    """Steps in which the trigger, or max_interval, called for an exchange."""
    asked: int
    """Requests that this rank made, including repeated ones after a refusal."""
    averaged: int
    """Averages that were made, requested by this rank or by its peer."""
    refused: int
    """Requests of this rank that a peer refused, or died before it answered."""
    skipped: int
    """Calls for an exchange without a free peer."""
    global_averages: int
    messages: int
    """Messages of averages in pairs, including those without weights."""
    local_bytes: int
    """Weights and halves through shared memory, and this rank's global averages there."""
    remote_bytes: int
    """Bytes that this rank sent to other nodes, for pairs and global averages."""
    last_distance: float
    """|w_peer - w| of the last average; NaN before the first."""
    lost: tuple[int, ...]
    """Ranks that are skipped because they died or left."""


@dataclass(frozen=True)
class Scores:
    """A score of all models; higher is better."""

    own: float
    worst: float
    average: float
    mean_model: float
    """Score of the model whose weights are the mean over ranks."""
