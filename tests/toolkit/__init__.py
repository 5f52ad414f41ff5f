"""Virtual nodes on one machine, and processes that leave nothing: for tests and benchmarks."""

__all__: list[str] = []
