"""Which rank reads which samples, and in which order; arithmetic only."""

__all__: list[str] = []
