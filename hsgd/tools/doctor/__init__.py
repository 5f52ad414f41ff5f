"""Reports of `hsgd doctor`, `hsgd info` and `hsgd clean` on an installation and a machine."""

__all__: list[str] = []
