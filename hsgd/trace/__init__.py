"""What collectives and operations spent their time on: records, and timelines made of them."""

__all__: list[str] = []
