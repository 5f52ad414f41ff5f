"""Programs for users: the hsgd command, and what it shows of machines and jobs."""

__all__: list[str] = []
