"""Timeline of hsgd.torch: which operation was where, as a Chrome trace.

Owns the file that is being written, if there is one. Never slows an operation down by more than
one append to a list.
"""

from __future__ import annotations

from typing import Any

__all__ = ["start", "stop"]


def start(job: Any, file_path: str) -> None:
    open(file_path, "w").close()


def stop() -> None:
    pass
