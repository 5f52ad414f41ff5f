"""Loaders for tests, which give options of all groups side by side."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hsgd.io import CacheOptions, PartitionedLoader, ReadOptions

__all__ = ["grouped", "loader_of"]

_READ = {field.name for field in fields(ReadOptions)}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a loader, of options that may be those of ReadOptions, and cache_bytes and
    exchange, those of CacheOptions.
    """
    read = {name: value for name, value in options.items() if name in _READ}
    others = {name: value for name, value in options.items() if name not in _READ}
    node_bytes, exchange = others.pop("cache_bytes", None), others.pop("exchange", "files")
    if node_bytes is not None:
        others["cache"] = CacheOptions(node_bytes, exchange)
    return {"read": ReadOptions(**read), **others}


def loader_of(*arguments: Any, **options: Any) -> PartitionedLoader:
    """PartitionedLoader(...)"""
    return PartitionedLoader(*arguments, **grouped(options))
