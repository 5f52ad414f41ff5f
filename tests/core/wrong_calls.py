"""A call that one rank makes wrongly, alone: it must be refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hsgd import Comm, HsgdError
from ranks import Seat

__all__ = ["refused_alone"]


def refused_alone(
    seat: Seat, path: str, call: Callable[[Comm], object], kind: type[Exception]
) -> str:
    """Make the call on rank 1 of two; its error. Were anything sent, the next one would differ."""
    comm = seat.comm(path, 2)
    line = ""
    if seat.rank == 1:
        with pytest.raises(kind) as caught:
            call(comm)
        assert not isinstance(caught.value, HsgdError)
        line = str(caught.value)
    assert comm.allreduce(np.ones(3)).tolist() == [2.0] * 3
    return line
