"""The programs of examples/frameworks: how they start, their environments, what they say."""

from __future__ import annotations

__all__: list[str] = []
