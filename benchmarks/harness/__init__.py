"""What the benchmarks share: jobs, layouts, turns, ratios, reports."""

__all__: list[str] = []
