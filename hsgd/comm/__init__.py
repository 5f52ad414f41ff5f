"""Comm: how ranks meet, and the collectives that they make."""

__all__: list[str] = []
