"""Comm: how ranks connect, and their collectives."""

__all__: list[str] = []
