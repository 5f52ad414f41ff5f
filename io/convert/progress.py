"""A progress bar in bytes for the commands of the reader."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hsgd.base.bytes_text import bytes_text

__all__ = ["Advance", "Progress"]

Advance = Callable[[int], object]  # called with the number of bytes done since the last call


class Progress:
    """A tqdm bar in bytes; one line if stderr is not a terminal; nothing without `show`."""

    def __init__(self, total_bytes: int, title: str, *, show: bool) -> None:
        self._total_bytes, self._title, self._show = total_bytes, title, show

    def __enter__(self) -> Advance:
        if not self._show or not sys.stderr.isatty():
            if self._show:
                print(f"{self._title}: {bytes_text(self._total_bytes)}", file=sys.stderr)
            self._bar = None
            return lambda count: None
        from tqdm import tqdm

        self._bar = tqdm(
            total=self._total_bytes, desc=self._title, unit="B", unit_scale=True, leave=False
        )
        advance: Advance = self._bar.update
        return advance

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
