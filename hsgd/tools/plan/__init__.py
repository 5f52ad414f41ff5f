"""Prediction of communication costs on another cluster: `hsgd plan`."""

__all__: list[str] = []
