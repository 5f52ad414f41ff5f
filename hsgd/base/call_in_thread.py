"""call_in_thread(): calls a function that may never return in a thread that nobody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["call_in_thread"]

Result = TypeVar("Result")


def call_in_thread(name: str, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Start function(*arguments) in a daemon thread and return the Future of its result; local.

    Raises RuntimeError if no thread can be started.
    """
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
