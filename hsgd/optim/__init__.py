"""Optimizers and training algorithms of hsgd, for any torch model.

LARS, LAMB and the learning rate schedule do not communicate: wrap the optimizer in a
DistributedOptimizer to train on many ranks.
"""

from hsgd.optim.diloco.diloco_metrics import DiLoCoMetrics
from hsgd.optim.diloco.diloco_optimizer import DiLoCo
from hsgd.optim.diloco.outer_optimizer import Nesterov
from hsgd.optim.diloco.pseudo_gradient_exchange import Int8, TopK
from hsgd.optim.elastic_averaging.easgd_optimizer import EASGDMetrics, ElasticAveraging
from hsgd.optim.gossip.gossip_metrics import GossipMetrics
from hsgd.optim.gossip.gossip_optimizer import Gossip
from hsgd.optim.gossip.noloco import NoLoCo
from hsgd.optim.gossip.topology import Topology
from hsgd.optim.large_batch.lamb import LAMB
from hsgd.optim.large_batch.lars import LARS
from hsgd.optim.large_batch.learning_rate import WarmupPolynomialLR
from hsgd.optim.node_shared.node_shared_optimizer import (
    NodeSharedOptimizer,
    SharedParameters,
    share_parameters,
)
from hsgd.optim.notified_tree.notified_tree_optimizer import NotifiedTree
from hsgd.optim.triggers.communication_triggers import (
    Budget,
    FixedPeriod,
    JitteredPeriod,
    RelativeChange,
    Trigger,
)

__all__ = [
    "LAMB",
    "LARS",
    "Budget",
    "DiLoCo",
    "DiLoCoMetrics",
    "EASGDMetrics",
    "ElasticAveraging",
    "FixedPeriod",
    "Gossip",
    "GossipMetrics",
    "Int8",
    "JitteredPeriod",
    "Nesterov",
    "NoLoCo",
    "NodeSharedOptimizer",
    "NotifiedTree",
    "RelativeChange",
    "SharedParameters",
    "TopK",
    "Topology",
    "Trigger",
    "WarmupPolynomialLR",
    "share_parameters",
]
