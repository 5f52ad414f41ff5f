"""One-sided access: notified windows, and the parameter box."""

__all__: list[str] = []
