"""Optimizers and training algorithms of hsgd, for any torch model.

Owns the public names of hsgd.optim. LARS, LAMB and the schedule never communicate: wrap an
optimizer in a DistributedOptimizer to train on many ranks.
"""

from hsgd.optim.elastic import ElasticAveraging, ElasticMetrics
from hsgd.optim.elastic_strategy import elastic_averaging
from hsgd.optim.lamb import LAMB
from hsgd.optim.lars import LARS
from hsgd.optim.node_shared import NodeSharedOptimizer, SharedParameters, share_parameters
from hsgd.optim.schedule import WarmupPolynomialLR
from hsgd.optim.tree import NotifiedTree
from hsgd.optim.tree_strategy import notified_tree

__all__ = [
    "LAMB",
    "LARS",
    "ElasticAveraging",
    "ElasticMetrics",
    "NodeSharedOptimizer",
    "NotifiedTree",
    "SharedParameters",
    "WarmupPolynomialLR",
    "elastic_averaging",
    "notified_tree",
    "share_parameters",
]
