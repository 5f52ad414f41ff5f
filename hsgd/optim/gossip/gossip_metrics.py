"""What Gossip tells of itself: counters of a rank, and figures of all models.

Owns the names of the figures. Never measures.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GossipMetrics", "Scores"]


@dataclass(frozen=True)
class GossipMetrics:
    """What this rank did since the beginning, or a resumed state."""

    steps: int
    triggers: int
    """Steps in which the trigger, or max_interval, called for an exchange."""
    asked: int
    """Requests that this rank made, again after a refusal included."""
    averaged: int
    """Averages that took place, asked for by this rank or by its peer."""
    refused: int
    """Requests of this rank that a peer refused, or did not live to answer."""
    skipped: int
    """Calls for an exchange for which there was nobody to ask."""
    global_averages: int
    messages: int
    """Of averages in pairs, those without weights included."""
    local_bytes: int
    """Weights and halves that passed through shared memory, and what this rank read and wrote there
    for global averages."""
    remote_bytes: int
    """What this rank sent to other nodes for either."""
    last_distance: float
    """|w_peer - w| of the last average; nan before."""
    lost: tuple[int, ...]
    """Ranks that are skipped because they died or left."""


@dataclass(frozen=True)
class Scores:
    """One figure of all models; higher is better."""

    own: float
    worst: float
    average: float
    mean_model: float
    """Of the model whose weights are the mean over ranks."""
