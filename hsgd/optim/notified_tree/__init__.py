"""Synchronous SGD over one-sided, notified trees, without collectives or barriers."""

__all__: list[str] = []
