"""Agreement of ranks on one order of operations: signatures, rounds, and stalls."""

__all__: list[str] = []
