"""Slabs in the memory of nodes, and who reads them from their files."""

__all__: list[str] = []
