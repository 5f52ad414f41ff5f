"""How the files of a dataset are understood: what a sample is, and where it lies."""

__all__: list[str] = []
