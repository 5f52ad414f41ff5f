"""One parse of the metadata per job: rank 0 examines the files, the others get what it found.

Opening thousands of files with HDF5 from thousands of ranks at once is what brings metadata servers
down; the others only open(2) what they read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.open_map import open_map
from ..rank_group import RankGroup
from ..remote.object_reader import RemoteAccess

__all__ = ["open_map_together"]


def open_map_together(
    path: str | os.PathLike[str],
    fields: Sequence[str] | None,
    group: str | None,
    comm: RankGroup,
    access: RemoteAccess | None = None,
) -> DataMap:
    """open_map() on rank 0, and its result, or its error, on all ranks; collective, blocking.

    All ranks see the files under the same path. Raises what open_map() raises, on every rank.
    """
    found: DataMap | Exception | None = None
    if comm.rank == 0:
        try:
            found = open_map(path, fields, group, access)
        except (DataError, ValueError, TypeError, ImportError) as error:
            found = error
    message = np.frombuffer(pickle.dumps(found), np.uint8)
    length = np.array([len(message)], np.int64)
    comm.broadcast(length)
    data = message.copy() if comm.rank == 0 else np.empty(int(length[0]), np.uint8)
    comm.broadcast(data)
    result = pickle.loads(data.tobytes())
    if isinstance(result, Exception):
        raise result
    if not isinstance(result, DataMap):
        raise TypeError(f"rank 0 sent {type(result).__name__}; use the same hsgd on all ranks")
    # The folder of a cache on disk, and when it was opened, are each rank's own.
    return result if result.access is None or access is None else replace(result, access=access)
