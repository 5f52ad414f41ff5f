"""One-sided communication: notified windows, and the parameter box."""

__all__: list[str] = []
