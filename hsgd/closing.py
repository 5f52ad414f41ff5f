"""Closing: what objects with a close() have in common.

Owns the with statement, and the question whether an error ends the program. Imports nothing of
hsgd, so that every room may use it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Closing", "program_failed"]


class Closing:
    """Something that `with` closes, however its block ends: its close() is called.

    left_by_error: an error ended the block, or the program: others should hear of it at once.
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
    """Whether an uncaught exception ends this program; for its last steps. At a prompt errors end
    nothing.
    """
    at_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    return not at_prompt and getattr(sys, "last_type", None) is not None


def _is_orderly(error: BaseException | None) -> bool:
    """Whether it ends a block, or the program, but no work: sys.exit() and the like."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, GeneratorExit)
