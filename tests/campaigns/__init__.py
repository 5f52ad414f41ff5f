"""Jobs with random faults (chaos), and jobs that run for hours (soak)."""

__all__: list[str] = []
