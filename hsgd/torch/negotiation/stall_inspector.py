"""StallInspector: reports operations that some ranks have submitted and others have not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError
from hsgd.torch.negotiation.round_plan import JOIN
from hsgd.torch.settings import HorovodSettings

__all__ = ["Open", "StallInspector", "ages", "describe", "missing"]

_PERIOD_S = 0.25
_LEAVE_S = 5.0  # wait for a running exchange at the end
_log = logging.getLogger("hsgd.torch")

Open = dict[tuple[int, str], float]
"""A rank's open operations: seconds since submission, by process set and name."""


def missing(
    tables: Sequence[Open], members: Callable[[int], Sequence[int]], least_s: float
) -> dict[tuple[int, str], list[int]]:
    """Return operations open for `least_s` on a rank, and the ranks that have not submitted them.

    Joined ranks do not count as missing; local.
    """
    found: dict[tuple[int, str], list[int]] = {}
    for table in tables:
        for key, age_s in table.items():
            if age_s < least_s or key in found or key[1] == JOIN:
                continue
            without = [
                rank
                for rank in members(key[0])
                if key not in tables[rank] and (key[0], JOIN) not in tables[rank]
            ]
            if without:
                found[key] = without
    return found


def describe(found: dict[tuple[int, str], list[int]], least_s: float) -> str:
    """Return the report, one line for each group of missing ranks."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for (_, name), ranks in found.items():
        by_ranks.setdefault(tuple(ranks), []).append(name)
    lines = [
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of "
        f"ranks and are waiting for remainder of ranks for more than {least_s:g} seconds. This may "
        "indicate that different ranks are trying to submit different tensors or that only subset "
        "of ranks is submitting tensors, which will cause deadlock."
    ]
    for missed, names in by_ranks.items():
        who = ", ".join(map(str, missed))
        lines.append(f"Missing ranks: {who} [{', '.join(names[:5])}{' ...' * (len(names) > 5)}]")
    return "\n".join(lines)


class StallInspector:
    """A thread in which all ranks compare open operations a few times per second; rank 0 reports.

    Args:
        comm: all ranks of the job; closed by close().
        opened: returns what this rank has open.
        members: returns the ranks of a process set.
        end: fails open operations, with the reason.
    """

    def __init__(
        self,
        comm: Comm,
        settings: HorovodSettings,
        opened: Callable[[], Open],
        members: Callable[[int], Sequence[int]],
        end: Callable[[str], None],
    ) -> None:
        self._comm = comm
        self._warning_s = settings.stall_warning_s
        self._shutdown_s = settings.stall_shutdown_s
        self._opened, self._members, self._end = opened, members, end
        self._stop = threading.Event()
        self._told: set[tuple[int, str]] = set()
        self._thread = threading.Thread(target=self._serve, name="hsgd.torch stall", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after up to 5 s for a running exchange; other ranks' inspectors stop as well."""
        self._stop.set()
        self._thread.join(_LEAVE_S)
        self._comm.close()

    def _serve(self) -> None:
        thresholds = [s for s in (self._warning_s, self._shutdown_s) if s > 0]
        period_s = min([_PERIOD_S, *(seconds / 4 for seconds in thresholds)])
        while not self._stop.wait(period_s):
            try:
                tables: list[Open] = self._comm.allgather_object(self._opened(), "hsgd.torch stall")
            except HsgdError:
                return  # a rank left or is lost: operations notice it themselves
            self._inspect(tables)

    def _inspect(self, tables: Sequence[Open]) -> None:
        open_now = {key for table in tables for key in table}
        self._told &= open_now
        found = missing(tables, self._members, self._warning_s)
        news = {key: ranks for key, ranks in found.items() if key not in self._told}
        if news and self._comm.rank == 0:
            _log.warning("%s", describe(news, self._warning_s))
        self._told |= news.keys()
        if self._shutdown_s > 0:
            lost = missing(tables, self._members, self._shutdown_s)
            if lost:
                self._end(
                    f"{describe(lost, self._shutdown_s)}\nOne or more rank is stalled for longer "
                    f"than {self._shutdown_s:g} seconds. Will shutdown."
                )


def ages(pending: Sequence[tuple[str, float]], process_set: int) -> Open:
    """Return a coordinator's pending operations as a part of Open; local."""
    now = time.monotonic()
    return {(process_set, name): now - since for name, since in pending}
