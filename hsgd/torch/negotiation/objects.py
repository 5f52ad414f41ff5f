"""Python objects between ranks, for hsgd's own use: what is exchanged is small and of its own make.

Owns the format: pickles, one after the other. Never loads what a user sent; functions.py does.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from hsgd.comm import Comm

__all__ = ["exchange"]


def exchange(comm: Comm, mine: Any, name: str) -> list[Any]:
    """The objects of all ranks, in rank order; collective, blocking. Raises as Comm.allgather."""
    import numpy as np

    packed = np.frombuffer(pickle.dumps(mine), np.uint8)
    reader = io.BytesIO(comm.allgather(packed, name=name).tobytes())
    return [pickle.load(reader) for _ in range(comm.size)]  # each knows its end
