"""Many nodes in SimGrid's SMPI: platforms, and runs of benchmarks/native/simulation on them."""

__all__: list[str] = []
