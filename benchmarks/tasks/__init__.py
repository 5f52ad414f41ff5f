"""What the trainings of rarely.py learn."""

__all__: list[str] = []
