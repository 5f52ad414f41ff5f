"""When to communicate, and how far weights have moved."""

__all__: list[str] = []
