"""What io_throughput.py --remote measures."""

__all__: list[str] = []
