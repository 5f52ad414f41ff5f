"""Elastic averaging (EASGD): workers held together by a centre."""

__all__: list[str] = []
