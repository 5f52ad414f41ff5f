"""Device tensors in a process group: hsgd's own collectives on CUDA, and torch's backends."""

__all__: list[str] = []
