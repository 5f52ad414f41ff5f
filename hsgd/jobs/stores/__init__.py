"""Key-value stores, by which the ranks of a job exchange values."""

__all__: list[str] = []
