"""Soak tests: what a rank holds stays flat over millions of operations and hours of training.

See docs/internals/reliability.md.
"""

__all__: list[str] = []
