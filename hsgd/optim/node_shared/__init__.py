"""One copy of the parameters per node."""

__all__: list[str] = []
