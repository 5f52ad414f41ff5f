"""Gossip: local SGD whose ranks average their models in pairs."""

__all__: list[str] = []
