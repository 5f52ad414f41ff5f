"""Elastic averaging (EASGD): workers and a centre that attract each other."""

__all__: list[str] = []
