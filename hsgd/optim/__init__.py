"""Optimizers and training algorithms of hsgd, for any torch model.

Owns the public names of hsgd.optim. LARS and LAMB never communicate: wrap an optimizer in a
DistributedOptimizer or a NotifiedTree to train on many ranks.
"""

from hsgd.optim.lamb import LAMB
from hsgd.optim.lars import LARS
from hsgd.optim.schedule import WarmupPolynomialLR
from hsgd.optim.tree import NotifiedTree
from hsgd.optim.tree_strategy import notified_tree

__all__ = ["LAMB", "LARS", "NotifiedTree", "WarmupPolynomialLR", "notified_tree"]
