"""Making batches from the stream of samples: reads, threads, buffers, errors."""

__all__: list[str] = []
