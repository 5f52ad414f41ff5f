"""Finding ranks that should hold the same values and do not."""

__all__: list[str] = []
