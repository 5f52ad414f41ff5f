"""What io_throughput.py --remote and --exchange measure."""

__all__: list[str] = []
