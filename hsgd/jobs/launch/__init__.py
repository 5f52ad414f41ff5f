"""How a job comes to run on hsgd: launchers, the Horovod plugin, the interposer."""

__all__: list[str] = []
