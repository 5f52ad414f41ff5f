"""Handle: an asynchronous collective that is under way, or has ended.

Owns the references that keep its communicator and its result alive. Never blocks but in wait(), and
never stops a collective: the communicator keeps the arrays of a dropped handle until they are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsgd.comm.communicator import Comm

__all__ = ["Handle", "Request"]

Result = TypeVar("Result")


class Request(Protocol):
    """What the core, or a device, gives for a collective that was started."""

    def done(self) -> bool:
        """Whether it has ended; never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """False when it has not ended in time; negative: waits on. Raises what it ended with."""

    def result(self) -> Any:
        """What it gives, when it has succeeded."""


class Handle(Generic[Result]):
    """What `Comm.allreduce_async` and its like return. The arrays of the call must be left alone
    until done() is true or wait() has returned.
    """

    __slots__ = ("__weakref__", "_comm", "_name", "_request", "_result", "_taken")
    _taken: list[Result]

    def __init__(
        self,
        comm: Comm,
        request: Request,
        result: Callable[[Request], Result],
        name: str,
    ) -> None:
        """result: makes what wait() returns of the request, when that has succeeded."""
        self._comm = comm
        self._request = request
        self._result = result
        self._name = name
        self._taken = []

    def done(self) -> bool:
        """Whether the collective has ended, in whatever way; local, never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the collective and return its result; blocking, releases the GIL.

        timeout: seconds; None waits until the collective ends, at the latest by its own deadline,
        `config.timeout_s` after it began.
        Returns what the blocking form of the collective returns, as often as it is asked. Raises
        what the collective raised: PeerLost, CollectiveTimeout, SignatureMismatch; where an earlier
        one lost a rank or passed its deadline, the same class about the same rank; HsgdError where
        Ctrl-C broke the communicator. Raises TimeoutError, which is no CollectiveTimeout, when
        `timeout` passes: the collective goes on. Ctrl-C ends the wait and breaks the communicator,
        as in a blocking collective.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"wait: timeout is {timeout!r}; give seconds from 0, or None")
        if not self._request.wait(-1.0 if timeout is None else timeout):
            raise TimeoutError(
                f"{self._name}: not finished within {timeout:g} s; it is still running, wait for "
                "it again"
            )
        if not self._taken:
            self._taken.append(self._result(self._request))
        return self._taken[0]  # also where another thread was first

    def __repr__(self) -> str:
        return f"<hsgd.Handle of {self._name}, {'done' if self.done() else 'open'}>"

    def __reduce__(self) -> str:
        raise TypeError("a Handle cannot be pickled or copied; wait for it where it was made")
