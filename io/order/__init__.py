"""The samples of each rank, and their order; only arithmetic."""

__all__: list[str] = []
