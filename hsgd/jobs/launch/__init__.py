"""Launching of jobs on hsgd: launchers, the Horovod plugin, the interposer."""

__all__: list[str] = []
