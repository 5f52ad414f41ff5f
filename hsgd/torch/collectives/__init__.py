"""Horovod's families of collectives: arguments, checks, gradients and handles."""

__all__: list[str] = []
