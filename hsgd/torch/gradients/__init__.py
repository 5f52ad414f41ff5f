"""Gradients on their way to all ranks, in buckets, while backward still runs."""

__all__: list[str] = []
