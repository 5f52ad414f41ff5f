"""Error classes of hsgd: each derives from HsgdError and from the closest built-in class."""

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
    "one_line",
]


class HsgdError(RuntimeError):
    """Base of all errors that hsgd itself raises; a RuntimeError, as torch's errors are.

    Attributes:
        rank: the rank that the error is about, or -1.
    """

    rank: int = -1


class PeerLost(HsgdError, ConnectionError):
    """A rank died, or closed what the others use, during a collective or another call.

    The communicator is broken; Comm.shrink() makes a new one without that rank.
    """


class CollectiveTimeout(HsgdError, TimeoutError):
    """A collective did not finish before its deadline.

    The communicator is broken; Comm.shrink() makes a new one without the ranks that hang.
    """


class QueueFull(CollectiveTimeout):
    """A NotifiedWindow had no room in time for an operation; nothing was sent, it stays usable."""


class SignatureMismatch(HsgdError, ValueError):
    """Ranks called one collective with different shapes, dtypes, ops or names. No data was mixed.

    Attributes:
        ranks: two ranks that differ.
        names: the names of their arrays, up to 63 characters; None for a call without a name.
    """

    ranks: tuple[int, int] = (-1, -1)
    names: tuple[str | None, str | None] = (None, None)


class ReplicasDiffer(HsgdError, ValueError):
    """Ranks that should hold the same parameters do not; raised on all of them.

    No rank was lost. An elastic job ends, as the replicas would differ again after a restart.

    Attributes:
        parameter: the first that differs, or None if the ranks have different sets of parameters.
        ranks: those that differ from the majority, or from the first rank if there is no majority.
    """

    parameter: str | None = None
    ranks: tuple[int, ...] = ()


class SharedMemoryError(HsgdError, MemoryError):
    """The machine or cgroup does not allow the shared memory that the ranks of a node need."""


class MissingExtra(HsgdError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class LaunchError(HsgdError, RuntimeError):
    """A job cannot be started as asked."""


class ClosedError(HsgdError, ValueError):
    """The called object is closed, or has no ranks any more."""


def one_line(text: str) -> str:
    """Return text with escapes for line breaks and codes that a terminal obeys; local."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class DataError(HsgdError, OSError):
    """A data file is missing, truncated, foreign or changed; its text is always one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


observers: list[Callable[[HsgdError], object]] = []
"""Functions called with each PeerLost and CollectiveTimeout of the core before it is raised.

They run in the thread that raises it. They must not raise, nor block for more than a moment.
"""


def about(rank: int, error: HsgdError) -> HsgdError:
    """Return `error` with its `rank` set to `rank`."""
    error.rank = rank
    return error
