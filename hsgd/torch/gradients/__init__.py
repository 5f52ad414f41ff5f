"""Reduction of gradients in buckets, while the backward pass runs."""

__all__: list[str] = []
