"""Elastic jobs of `hsgd run --min-np`: agents start, watch and regroup ranks (docs/elastic.md)."""

__all__: list[str] = []
