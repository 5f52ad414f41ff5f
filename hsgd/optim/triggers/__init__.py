"""Triggers for communication, and a measure of how far weights have moved."""

__all__: list[str] = []
