"""Many nodes in SimGrid's SMPI: networks, runs of benchmarks/native/simulation on them, bounds, and
what benchmarks/simulate.py chooses and draws.
"""

__all__: list[str] = []
