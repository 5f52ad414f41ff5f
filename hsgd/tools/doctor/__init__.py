"""What `hsgd info` and `hsgd clean` tell of an installation, a machine and a running job."""

__all__: list[str] = []
