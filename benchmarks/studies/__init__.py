"""Parts of larger benchmarks: simulations, peers and files that are compared."""

__all__: list[str] = []
