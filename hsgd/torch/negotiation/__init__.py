"""How ranks agree on one order of operations: signatures, rounds, what stalls."""

__all__: list[str] = []
