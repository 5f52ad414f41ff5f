"""From the stream of samples to batches: reads, threads, buffers, errors."""

__all__: list[str] = []
