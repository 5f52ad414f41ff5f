"""The toy of tests that compare training with NumPy: quadratics, another for each worker."""

from __future__ import annotations

import numpy as np

__all__ = ["drawn", "gradient", "initial"]


def drawn(*key: int) -> np.random.Generator:
    """The same numbers for the same key."""
    return np.random.default_rng(key)


def initial(index: int, size: int) -> np.ndarray:
    """First weights of a parameter, equal on all workers: float64 (size,)."""
    return drawn(99, index).normal(size=size)


def gradient(weights: np.ndarray, worker: int, step: int, index: int) -> np.ndarray:
    """Of 1/2 sum(c (w - m)^2) + noise w, in the dtype of the weights."""
    own = drawn(worker, index)
    curvature, minimum = own.uniform(0.2, 2, weights.size), own.normal(size=weights.size)
    noise = drawn(worker, index, step).normal(size=weights.size)
    return (curvature * (weights - minimum) + noise).astype(weights.dtype)
