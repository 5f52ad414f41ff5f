"""Refusal by a root of its arguments, reported by a collective that matches no other rank's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hsgd.c10d.work import HsgdWork
from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError, SignatureMismatch

__all__ = ["refused_by_root", "telling"]

_REFUSED = "the root refused its own arguments"


@contextlib.contextmanager
def telling(what: str, comm: Comm) -> Iterator[None]:
    """Notify the ranks of comm if the body raises TypeError or ValueError; local."""
    try:
        yield
    except (TypeError, ValueError):

        def tell() -> None:
            with contextlib.suppress(HsgdError):
                note = torch.zeros(1, dtype=torch.uint8)
                comm.broadcast(note, comm.rank, name=f"{what}: {_REFUSED}")

        HsgdWork(f"{what} that is refused", [], comm, call=tell).start(blocking=False)
        raise


def refused_by_root(error: SignatureMismatch, what: str) -> SignatureMismatch | None:
    """Return the error of waiting ranks if a root refused; else None."""
    for rank, name in zip(error.ranks, error.names, strict=True):
        if name is not None and name.endswith(_REFUSED):
            refused = SignatureMismatch(
                f"{what}: the root, rank {rank}, refused its own arguments; see what it says"
            )
            refused.rank, refused.ranks = rank, error.ranks
            return refused
    return None
