"""What communication will cost on a cluster that is not here: `hsgd plan`."""

__all__: list[str] = []
