"""Which rank reads which samples, and in which order; only arithmetic."""

__all__: list[str] = []
