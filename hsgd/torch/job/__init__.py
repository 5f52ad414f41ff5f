"""The job between init() and shutdown(): ranks, process sets, timeline, and Horovod's own path."""

__all__: list[str] = []
