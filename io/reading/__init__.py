"""Reading rows from files into memory."""

__all__: list[str] = []
