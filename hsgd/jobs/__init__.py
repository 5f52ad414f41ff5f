"""Jobs: what started this process, how a job is started, and elastic jobs."""

__all__: list[str] = []
