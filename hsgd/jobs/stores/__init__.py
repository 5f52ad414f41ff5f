"""Stores of keys and values in which the ranks of a job read what others wrote."""

__all__: list[str] = []
