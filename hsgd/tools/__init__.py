"""Programs for users: the hsgd command, and its reports on machines and jobs."""

__all__: list[str] = []
