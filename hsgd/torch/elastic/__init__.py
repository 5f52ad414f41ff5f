"""Elastic training: states, a sampler, and the loop that continues when ranks come and go."""

from __future__ import annotations

from hsgd.torch.elastic.recovery_loop import run
from hsgd.torch.elastic.sampler import ElasticSampler
from hsgd.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
