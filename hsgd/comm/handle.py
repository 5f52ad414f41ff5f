"""Handle: an asynchronous collective that is running or has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsgd.comm.communicator import Comm

__all__ = ["Handle", "Request"]

Result = TypeVar("Result")


class Request(Protocol):
    """A started collective of the core or a device."""

    def done(self) -> bool:
        """Return whether it has ended; never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Return False if it has not ended in time; negative waits on. Raises its error."""

    def result(self) -> Any:
        """Return the result of a collective that succeeded."""


class Handle(Generic[Result]):
    """Result of `Comm.allreduce_async` and the other `_async` methods.

    The program must not use the arrays of the call until done() is true or wait() has returned. A
    dropped handle does not stop its collective: the communicator keeps the arrays until it is done.
    """

    __slots__ = ("__weakref__", "_comm", "_name", "_request", "_result", "_taken")
    _taken: list[Result]

    def __init__(
        self, comm: Comm, request: Request, result: Callable[[Request], Result], name: str
    ) -> None:
        """Keep the request; `result` makes the value of wait() from it."""
        self._comm = comm
        self._request = request
        self._result = result
        self._name = name
        self._taken = []

    def done(self) -> bool:
        """Return whether the collective has ended, in any way; local, never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the collective and return its result; blocking, releases the GIL.

        May be called again. Ctrl-C ends the wait and breaks the communicator, as in a blocking
        collective.

        Args:
            timeout: seconds; None waits until the collective ends, at the latest by its own
                deadline, `config.timeout_s` after it began.

        Raises:
            PeerLost, CollectiveTimeout, SignatureMismatch: from this collective. If an earlier one
                lost a rank or passed its deadline, the same class about the same rank.
            HsgdError: Ctrl-C broke the communicator.
            TimeoutError: `timeout` passed, and the collective continues; no CollectiveTimeout.
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
        return self._taken[0]  # the same if another thread was first

    def __repr__(self) -> str:
        return f"<hsgd.Handle of {self._name}, {'done' if self.done() else 'open'}>"

    def __reduce__(self) -> str:
        raise TypeError("a Handle cannot be pickled or copied; wait for it where it was made")
