"""The job between init() and shutdown(): ranks, process sets, timeline, and Horovod beside it."""

__all__: list[str] = []
