"""Closing: base of objects with a close(), and errors at the end of the program."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Closing", "describe_failure", "failing_with", "program_failed", "wait_for_tellers"]

_TOLD_S = 1.0
_SHOWN = 160  # characters of an error's text


class Closing:
    """Object that a `with` statement closes, however its block ends.

    Attributes:
        left_by_error: an error ended the block or the program; other ranks should learn this at
            once.
    """

    left_by_error = False

    if TYPE_CHECKING:

        def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left_by_error = kind is not None and not _is_orderly(error)
        self.close()


def program_failed() -> bool:
    """Return whether an uncaught exception ends this program; at an interactive prompt never."""
    at_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    return not at_prompt and getattr(sys, "last_type", None) is not None


def failing_with() -> BaseException | None:
    """Return the error that passes or ends the program, None at an orderly end; local."""
    error = sys.exc_info()[1]
    if error is None and program_failed():
        error = sys.last_value
    return None if _is_orderly(error) else error


def describe_failure(error: BaseException) -> str:
    """Describe an error for other ranks, on one line: "raised ValueError: bad batch"; local."""
    try:
        line = " ".join(str(error).split())
    except Exception:  # its class is the program's own
        line = ""
    cut = line[:_SHOWN] + "..." * (len(line) > _SHOWN)
    cut = cut.encode(errors="backslashreplace").decode()  # lone surrogates, as of file names
    return f"raised {type(error).__name__}" + (f": {cut}" if cut else "")


def wait_for_tellers() -> None:
    """Wait, at most one second, until no thread prints an uncaught error; local, blocking.

    Called at the end of a program: CPython aborts the process ("could not acquire lock for <stderr>
    at interpreter shutdown") if it ends while a daemon thread writes a traceback.
    """
    deadline = time.monotonic() + _TOLD_S
    while _some_thread_tells_its_error() and time.monotonic() < deadline:
        time.sleep(0.001)


def _some_thread_tells_its_error() -> bool:
    """Return whether a thread is in the function by which `threading` calls excepthook."""
    own = threading.get_ident()
    for ident, top in sys._current_frames().items():
        frame = None if ident == own else top
        while frame is not None:
            if frame.f_code.co_name == "invoke_excepthook":
                return True
            frame = frame.f_back
    return False


def _is_orderly(error: BaseException | None) -> bool:
    """Return whether `error` ends a block or program without a failure, as sys.exit() does."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, GeneratorExit)
