"""Error classes of hsgd: each derives from HsgdError and from the closest built-in class.

Owns the names that a caller may catch. Never formats messages: whoever raises writes one line that
says what failed, who, with which values, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "ClosedError",
    "CollectiveTimeout",
    "DataError",
    "HsgdError",
    "LaunchError",
    "MissingExtra",
    "PeerLost",
    "QueueFull",
    "ReplicasDiffer",
    "SharedMemoryError",
    "SignatureMismatch",
    "about",
    "observers",
]


class HsgdError(RuntimeError):
    """Base of all errors that hsgd raises on its own account; RuntimeErrors, as those of torch.

    rank: the rank that the error is about, or -1.
    """

    rank: int = -1


class PeerLost(HsgdError, ConnectionError):
    """A rank died during a collective. The communicator is broken; Comm.shrink() makes a new one
    without that rank.
    """


class CollectiveTimeout(HsgdError, TimeoutError):
    """A collective did not finish before its deadline. The communicator is broken; Comm.shrink()
    makes a new one without ranks that hang.
    """


class QueueFull(CollectiveTimeout):
    """A NotifiedWindow had no room for another operation within the time given. Nothing was sent,
    and the NotifiedWindow stays usable.
    """


class SignatureMismatch(HsgdError, ValueError):
    """Ranks called one collective with different shapes, dtypes, ops or names. No data was
    mixed.

    ranks: two ranks that differ. names: what they called their arrays, up to 63 characters; None
    where a call had no name.
    """

    ranks: tuple[int, int] = (-1, -1)
    names: tuple[str | None, str | None] = (None, None)


class ReplicasDiffer(HsgdError, ValueError):
    """Ranks that should hold the same parameters do not; raised by all of them. Nothing was lost on
    the way: an elastic job ends, as it would differ again.

    parameter: the first that differs, or None where ranks have other ones. ranks: those that differ
    from most, or from the first rank where there is no majority.
    """

    parameter: str | None = None
    ranks: tuple[int, ...] = ()


class SharedMemoryError(HsgdError, MemoryError):
    """Shared memory for the ranks of a node could not be had within the limits of the machine or
    cgroup.
    """


class MissingExtra(HsgdError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class LaunchError(HsgdError, RuntimeError):
    """A job cannot be started as asked."""


class ClosedError(HsgdError, ValueError):
    """What was called is closed, or has no ranks any more."""


class DataError(HsgdError, OSError):
    """A data file is missing, truncated, foreign or changed."""


observers: list[Callable[[HsgdError], object]] = []
"""Called with each PeerLost and CollectiveTimeout of the core before it is raised, from the thread
that raises it; must neither raise nor block."""


def about(rank: int, error: HsgdError) -> HsgdError:
    """`error`, which names that rank; for whoever raises one."""
    error.rank = rank
    return error
