"""Elastic training: states that are saved, restored and sent, the sampler that goes with them, and
the loop that goes on when ranks are lost or join.
"""

from __future__ import annotations

from hsgd.torch.elastic.recovery_loop import run
from hsgd.torch.elastic.sampler import ElasticSampler
from hsgd.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
