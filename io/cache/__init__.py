"""Slabs in the memory of nodes, and which rank reads them from files."""

__all__: list[str] = []
