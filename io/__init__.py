"""hsgd.io: training data as contiguous HDF5 slabs, read at the speed of the disk.

Owns the names below and loads them when they are first used: importing hsgd.io imports neither h5py
nor torch. Never imports the rest of hsgd, besides its errors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsgd.io.convert import convert_to_slabs
    from hsgd.io.datamap import DataMap, open_map
    from hsgd.io.dataset import PartitionedDataset
    from hsgd.io.loader import Batch, PartitionedLoader
    from hsgd.io.partition import EpochOrder, Share, share_of
    from hsgd.io.ragged import Ragged
    from hsgd.io.reader import RowReader

__all__ = [
    "Batch",
    "DataMap",
    "EpochOrder",
    "PartitionedDataset",
    "PartitionedLoader",
    "Ragged",
    "RowReader",
    "Share",
    "convert_to_slabs",
    "open_map",
    "share_of",
]

_HOMES = {
    "Batch": "loader",
    "DataMap": "datamap",
    "EpochOrder": "partition",
    "PartitionedDataset": "dataset",
    "PartitionedLoader": "loader",
    "Ragged": "ragged",
    "RowReader": "reader",
    "Share": "partition",
    "convert_to_slabs": "convert",
    "open_map": "datamap",
    "share_of": "partition",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
