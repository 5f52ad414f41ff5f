"""Strategies of DistributedOptimizer: from the job's ranks to the algorithms of hsgd.optim."""

__all__: list[str] = []
