"""hsgd.io: training data as contiguous HDF5 slabs, read at the speed of the disk.

Owns the names below and loads them when they are first used: importing hsgd.io imports neither h5py
nor torch. Never imports the rest of hsgd, besides its errors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches.image_decoder import images
    from .convert.conversion import convert_to_slabs
    from .convert.sample_writer import SampleWriter
    from .convert.upload import upload_slabs
    from .dataset import PartitionedDataset
    from .format.attributes import class_names
    from .format.dataset_index import DataMap, open_map
    from .format.ragged import Ragged
    from .loader import Batch, PartitionedLoader
    from .options import CacheOptions, ReadOptions
    from .order.partition import EpochOrder, Share, share_of
    from .reading.reader import RowReader

__all__ = [
    "Batch",
    "CacheOptions",
    "DataMap",
    "EpochOrder",
    "PartitionedDataset",
    "PartitionedLoader",
    "Ragged",
    "ReadOptions",
    "RowReader",
    "SampleWriter",
    "Share",
    "class_names",
    "convert_to_slabs",
    "images",
    "open_map",
    "share_of",
    "upload_slabs",
]

_HOMES = {
    "Batch": "loader",
    "CacheOptions": "options",
    "DataMap": "format.dataset_index",
    "EpochOrder": "order.partition",
    "PartitionedDataset": "dataset",
    "PartitionedLoader": "loader",
    "Ragged": "format.ragged",
    "ReadOptions": "options",
    "RowReader": "reading.reader",
    "SampleWriter": "convert.sample_writer",
    "Share": "order.partition",
    "class_names": "format.attributes",
    "convert_to_slabs": "convert.conversion",
    "images": "batches.image_decoder",
    "open_map": "format.dataset_index",
    "share_of": "order.partition",
    "upload_slabs": "convert.upload",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
