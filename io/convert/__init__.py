"""Conversion of any source to slab folders, and their verification."""

__all__: list[str] = []
