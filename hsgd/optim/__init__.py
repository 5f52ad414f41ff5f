"""Optimizers and training algorithms of hsgd, for any torch model.

Owns the public names of hsgd.optim. LARS, LAMB and the schedule never communicate: wrap an
optimizer in a DistributedOptimizer to train on many ranks.
"""

from hsgd.optim.elastic import ElasticAveraging, ElasticMetrics
from hsgd.optim.elastic_strategy import elastic_averaging
from hsgd.optim.gossip import Gossip
from hsgd.optim.gossip_records import GossipMetrics
from hsgd.optim.lamb import LAMB
from hsgd.optim.lars import LARS
from hsgd.optim.node_shared import NodeSharedOptimizer, SharedParameters, share_parameters
from hsgd.optim.schedule import WarmupPolynomialLR
from hsgd.optim.topology import Topology
from hsgd.optim.tree import NotifiedTree
from hsgd.optim.tree_strategy import notified_tree
from hsgd.optim.triggers import Budget, FixedPeriod, JitteredPeriod, RelativeChange, Trigger

__all__ = [
    "LAMB",
    "LARS",
    "Budget",
    "ElasticAveraging",
    "ElasticMetrics",
    "FixedPeriod",
    "Gossip",
    "GossipMetrics",
    "JitteredPeriod",
    "NodeSharedOptimizer",
    "NotifiedTree",
    "RelativeChange",
    "SharedParameters",
    "Topology",
    "Trigger",
    "WarmupPolynomialLR",
    "elastic_averaging",
    "notified_tree",
    "share_parameters",
]
