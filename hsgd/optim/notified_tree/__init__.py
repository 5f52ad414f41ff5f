"""NotifiedTree: synchronous SGD over trees of one-sided, notified writes."""

__all__: list[str] = []
