"""Detection of ranks whose values should be equal and are not."""

__all__: list[str] = []
