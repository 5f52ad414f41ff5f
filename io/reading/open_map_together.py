"""One examination of the files per job, by rank 0, which broadcasts the result.

If thousands of ranks open thousands of files with HDF5 at once, metadata servers break down; here
the other ranks only open(2) the files that they read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hsgd.errors import DataError

from ..format.data_map import DataMap
from ..format.opening import identity_of
from ..layouts.files_of import Place
from ..layouts.open_map import open_map
from ..layouts.single_map import Layout
from ..rank_group import RankGroup
from ..remote.object_reader import RemoteAccess

__all__ = ["open_map_together"]

_LOOKS = 16  # at files, to learn whether they are those of rank 0: not at all of thousands


def open_map_together(
    path: Place | Sequence[Place],
    fields: Sequence[str] | None,
    group: str | None,
    comm: RankGroup,
    access: RemoteAccess | None = None,
    layout: Layout = "auto",
) -> DataMap:
    """Call open_map() on rank 0 and return its result on all ranks; collective, blocking.

    All ranks see the files under the same path: the same files, or a slab folder that was copied to
    each node. What open_map() raises is raised on every rank. Raises SignatureMismatch if a node
    has another slab folder there.
    """
    found: DataMap | Exception | None = None
    if comm.rank == 0:
        try:
            found = open_map(path, fields, group, access, layout)
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
    if result.header is not None and result.access is None:
        result = _own_copy(result, comm, lambda: open_map(path, fields, group, access, layout))
    # Each rank has its own folder for the cache on disk, and its own time of opening.
    return result if result.access is None or access is None else replace(result, access=access)


def _own_copy(found: DataMap, comm: Any, examine: Callable[[], DataMap]) -> DataMap:
    """Return rank 0's map, or an own one of this node's copy of a slab folder; collective."""
    from hsgd.comm.agree import agree

    own = found

    def terms() -> dict[str, object]:
        nonlocal own
        some = found.slabs[:: -(-len(found.slabs) // _LOOKS)]
        try:
            is_same = all(identity_of(os.stat(slab.path)) == slab.identity for slab in some)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be opened: {error.strerror}") from None
        own = found if is_same else examine()
        return {"dataset": own.fingerprint(), "samples": own.num_samples}

    agree(comm, f"PartitionedLoader({found.path!r})", terms, "copy the same folder to every node")
    return own
