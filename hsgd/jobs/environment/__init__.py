"""Environment of this process: which rank of which job it is, and how the job ends."""

__all__: list[str] = []
