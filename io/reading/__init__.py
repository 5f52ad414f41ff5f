"""Rows from files to memory."""

__all__: list[str] = []
