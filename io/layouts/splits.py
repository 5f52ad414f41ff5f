"""Names of the splits of a dataset: train, test and the like, which are converted one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hsgd.errors import DataError

__all__ = ["is_split", "refuse_splits"]

_SPLITS = frozenset(
    {
        *("train", "training", "val", "valid", "validation", "dev", "eval", "evaluation"),
        *("test", "testing", "holdout"),
    }
)
_FIRST_WORD = re.compile("[a-z]*")
_SHOWN = 3


def is_split(name: str) -> bool:
    """Return whether a name is that of a split."""
    return name.casefold() in _SPLITS


def refuse_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raise DataError if file names begin with several splits: train.h5, test-00000.h5."""
    words = {file.name: _first_word(file) for file in files}
    if len(set(words.values())) > 1 and all(map(is_split, words.values())):
        shown = {word: name for name, word in reversed(words.items())}
        raise DataError(
            f"{folder}: its files are splits, which would become one data set: "
            f"{', '.join(sorted(shown.values())[:_SHOWN])}; convert one file at a time, or put "
            "each split into a folder of its own"
        )


def _first_word(file: Path) -> str:
    found = _FIRST_WORD.match(file.name.casefold())
    return found[0] if found else ""
