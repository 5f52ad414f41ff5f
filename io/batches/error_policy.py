"""ErrorPolicy: decides what happens to a batch that cannot be read, the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..rank_group import RankGroup
from .batch_source import Filled

__all__ = ["ErrorPolicy"]


class ErrorPolicy:
    """Judge of the batches of one iteration; with a comm collective, one call per batch."""

    def __init__(self, on_error: str, comm: RankGroup | None, rank: int) -> None:
        self.on_error = on_error
        self.skipped = 0  # batches left out
        self.substituted = 0  # samples replaced on this rank
        self.rank = rank
        self._comm = comm
        self._reason = ""
        self._good: dict[str, Any] = {}  # a sample that can replace a whole batch

    def judge(
        self,
        filled: Filled | None,
        step: int,
        failure: BaseException | None,
        arrays: dict[str, Any],
    ) -> bool:
        """Decide whether to deliver batch `step`; all ranks with a comm get the same answer.

        `filled` is the batch, None if `failure` came in its place; rows of its fields `arrays` are
        substituted in place. Raises the error of this rank, naming batch and rank, or DataError
        naming a rank with an error.
        """
        if failure is None and filled is not None and filled.bad:
            if self.on_error != "substitute" or not self._substitute(filled, arrays):
                failure = filled.bad[0][1]
        elif self.on_error == "substitute" and filled is not None and filled.count:
            self._good = self._good or {n: values[:1].copy() for n, values in arrays.items()}
        failed_rank = self._agree(-1 if failure is None else self.rank)
        if failed_rank < 0:
            return True
        if self.on_error == "skip" and (failure is None or isinstance(failure, DataError)):
            self.skipped += 1
            if failure is not None:
                self._reason = self._reason or f"{failure} (batch {step} of rank {self.rank})"
            return False
        if isinstance(failure, DataError) and failure.rank < 0:
            named = DataError(f"{failure} (batch {step} of rank {self.rank})")
            named.rank = self.rank
            raise named from failure
        if failure is not None:
            raise failure
        raise DataError(
            f"batch {step} of rank {failed_rank} could not be read, so no rank has it; "
            "that rank's own error says why"
        )

    def take_reason(self) -> str:
        """Return, and clear, why this rank could not read the first batch that it left out; ""."""
        reason, self._reason = self._reason, ""
        return reason

    def _agree(self, failed_rank: int) -> int:
        """Return the largest rank with an error, -1 if there is none."""
        if self._comm is None:
            return failed_rank
        return int(self._comm.allreduce(np.array([failed_rank], np.int32), op="max")[0])

    def _substitute(self, filled: Filled, arrays: dict[str, NDArray[Any]]) -> bool:
        """Replace bad samples by good ones; return False if there was no good one yet."""
        bad = np.unique(np.concatenate([rows for rows, _ in filled.bad]))
        good = np.setdiff1d(np.arange(filled.count), bad)
        if not len(good) and not self._good:
            return False
        for name, values in arrays.items():
            if len(good):
                values[bad] = values[np.resize(good, len(bad))]
            else:
                values[bad] = self._good[name]
        self.substituted += len(bad)
        return True
