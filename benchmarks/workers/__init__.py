"""What the ranks of benchmarks run; rank.py starts them."""

__all__: list[str] = []
