"""Operations on tensors, once all ranks agree: reductions, moves, and those without data."""

__all__: list[str] = []
