"""DiLoCo: workers train locally and average their progress from time to time."""

__all__: list[str] = []
