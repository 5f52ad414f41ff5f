"""hsgd.io: training data as contiguous HDF5 slabs, read at the speed of the disk.

The names below are loaded on first use: importing hsgd.io imports neither h5py nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batches.dense_rows import dense
    from .batches.image_decoder import images
    from .convert.convert_to_slabs import convert_to_slabs
    from .convert.sample_writer import SampleWriter
    from .convert.upload_slabs import upload_slabs
    from .dataset import PartitionedDataset
    from .format.attributes import class_names
    from .format.data_map import DataMap
    from .format.ragged import Ragged
    from .layouts.open_map import open_map
    from .loader import Batch, PartitionedLoader
    from .mixed_loader import MixedLoader
    from .options import CacheOptions, ReadOptions
    from .order.epoch_order import EpochOrder, Share, share_of
    from .reading.row_reader import RowReader

__all__ = [
    "Batch",
    "CacheOptions",
    "DataMap",
    "EpochOrder",
    "MixedLoader",
    "PartitionedDataset",
    "PartitionedLoader",
    "Ragged",
    "ReadOptions",
    "RowReader",
    "SampleWriter",
    "Share",
    "class_names",
    "convert_to_slabs",
    "dense",
    "images",
    "open_map",
    "share_of",
    "upload_slabs",
]

_HOMES = {
    "Batch": "loader",
    "CacheOptions": "options",
    "DataMap": "format.data_map",
    "EpochOrder": "order.epoch_order",
    "MixedLoader": "mixed_loader",
    "PartitionedDataset": "dataset",
    "PartitionedLoader": "loader",
    "Ragged": "format.ragged",
    "ReadOptions": "options",
    "RowReader": "reading.row_reader",
    "SampleWriter": "convert.sample_writer",
    "Share": "order.epoch_order",
    "class_names": "format.attributes",
    "convert_to_slabs": "convert.convert_to_slabs",
    "dense": "batches.dense_rows",
    "images": "batches.image_decoder",
    "open_map": "layouts.open_map",
    "share_of": "order.epoch_order",
    "upload_slabs": "convert.upload_slabs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
