"""The judge of a case that was run: what was promised, and what was seen instead.

Owns the promises (docs/reliability.md says them to users). A verdict is a list of lines, each with
its kind first; an empty list is a case as it should be.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

from campaigns.chaos.case_job import Observed
from campaigns.chaos.cases import FAULTS
from campaigns.chaos.layers import LAYERS
from campaigns.job import RankSeen

__all__ = ["KINDS", "Verdict", "judge"]

KINDS = ("hang", "crash", "wrong result", "wrong error", "wrong blame", "no error", "leak")
_ENDS_OTHERS_S = 5.0  # mpirun, when it has seen an exit code
_TOLD_S = 0.5  # two ends may be told in the other order
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


@dataclass
class Verdict:
    """problems: kind, then what was seen. latency_s: from the fault to the error, of each rank that
    raised one, where the fault is one that others hear of at once and the victim had joined them.
    """

    problems: list[tuple[str, str]] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)


def judge(seen: Observed) -> Verdict:
    """What is wrong with it."""
    verdict = Verdict()
    for rank in range(len(seen.ranks)):
        _judge_rank(seen, rank, verdict)
    if LAYERS[seen.case.layer].blames == "one":
        _judge_blame(seen, verdict)
    verdict.problems += [("leak", what) for what in seen.left]
    return verdict


def _judge_rank(seen: Observed, rank: int, verdict: Verdict) -> None:
    case, found = seen.case, seen.ranks[rank]
    fault, is_victim = FAULTS[case.fault], rank == case.victim and seen.took_place

    def report(kind: str, what: str) -> None:
        who = f"rank {rank} (the victim)" if is_victim else f"rank {rank}"
        verdict.problems.append((kind, f"{who} {what}"))

    if wrong := found.told.get("wrong"):
        report("wrong result", wrong["text"])
    if found.overdue or found.status is None:
        if not (is_victim and case.fault == "gil"):
            report("hang", f"had not ended; it had said {', '.join(found.told) or 'nothing'}")
        return
    died_of = os.WTERMSIG(found.status) if os.WIFSIGNALED(found.status) else 0
    if died_of in _CRASHES and not (is_victim and case.fault == "abort"):
        report("crash", f"got {signal.Signals(died_of).name}: {_tail(found)}")
        return
    ended_by_launcher = _ended_by_launcher(seen, found, died_of)
    if ended_by_launcher or (is_victim and (fault.ends or fault.raises or fault.hangs)):
        return
    if not is_victim and not found.told and found.status != 0:
        report("crash", f"ended with status {found.status} before it began: {_tail(found)}")
        return
    if "wrong" in found.told:
        return
    if found.error is not None:
        _judge_error(seen, rank, report, verdict)
    elif found.status != 0:
        report("crash", f"ended with status {found.status}: {_tail(found)}")
    elif not _may_succeed(seen, found):
        report("no error", f"ended well after {found.steps} steps")


def _ended_by_launcher(seen: Observed, found: RankSeen, died_of: int) -> bool:
    """Where mpirun, or MPI, ends all ranks when one has ended, that is how the others learn of it:
    with ULFM, by a signal, when one has ended with an exit code, which may be a rank that was told
    of the fault; without it always.
    """
    launch = LAYERS[seen.case.layer].launch
    fault = FAULTS[seen.case.fault]
    fails = seen.took_place and (fault.ends or fault.hangs or fault.raises or fault.cuts)
    if launch is None or not fails or found.error is not None or found.status == 0:
        return False
    if not launch.lives_on:
        return died_of in (0, signal.SIGTERM, signal.SIGKILL)
    soon = any(
        rank.status is not None
        and os.waitstatus_to_exitcode(rank.status) > 0
        and -_TOLD_S < found.ended_at - rank.ended_at < _ENDS_OTHERS_S
        for rank in seen.ranks
    )
    return soon and died_of in (signal.SIGTERM, signal.SIGKILL)


def _judge_blame(seen: Observed, verdict: Verdict) -> None:
    """Somebody must name the victim, if anybody was told of a fault."""
    fault = FAULTS[seen.case.fault]
    others = [each for rank, each in enumerate(seen.ranks) if rank != seen.case.victim]
    blamed = [each.error["rank"] for each in others if each.error is not None]
    if fault.cuts and seen.took_place:
        reports = [(rank, each.error["rank"]) for rank, each in enumerate(seen.ranks) if each.error]
        if reports and not any(_is_beyond(seen, rank, named) for rank, named in reports):
            verdict.problems.append(("wrong blame", f"nobody blames the other side: {reports}"))
    if (
        seen.took_place
        and (fault.ends or fault.hangs)
        and blamed
        and seen.case.victim not in blamed
        and not all(_is_unknown(seen, each.error) for each in others if each.error)
    ):
        verdict.problems.append(("wrong blame", f"ranks {blamed} are blamed"))


def _may_succeed(seen: Observed, found: RankSeen) -> bool:
    """Whether it may have missed nothing: all that it called, the victim had called."""
    fault = FAULTS[seen.case.fault]
    if not seen.took_place or not (fault.ends or fault.hangs or fault.cuts):
        return True
    victim = seen.ranks[seen.case.victim]
    return LAYERS[seen.case.layer].goes_on or victim.steps >= found.steps - 1


def _judge_error(seen: Observed, rank: int, report: object, verdict: Verdict) -> None:
    case, error = seen.case, seen.ranks[rank].error
    assert error is not None and callable(report)
    layer, fault = LAYERS[case.layer], FAULTS[case.fault]
    text = f"{error['kind'][0]}: {error['text']}"
    may_fail = seen.took_place and (fault.ends or fault.hangs or fault.raises or fault.cuts)
    if not may_fail:
        report("wrong error", f"raised though nothing failed: {text}")
        return
    # Who cannot make its part of something new refuses; the others hear that.
    errors = layer.errors if not fault.raises or fault.ends else ("HsgdError",)
    if not set(error["kind"]) & {*layer.errors, *errors}:
        report("wrong error", f"raised {text}")
    elif fault.cuts:
        if layer.blames == "all" and not _is_beyond(seen, rank, error["rank"]):
            report("wrong blame", f"blames rank {error['rank']} of its own side: {text}")
    elif layer.blames == "all" and error["rank"] != case.victim and not _is_unknown(seen, error):
        report("wrong blame", f"blames rank {error['rank']}: {text}")
    if fault.ends and "ready" in seen.ranks[case.victim].told:
        raised = seen.ranks[case.victim].error  # later than the order to fail
        verdict.latency_s.append(error["at"] - (raised["at"] if raised else seen.fault_at))


def _in_setup(seen: Observed) -> bool:
    """Whether some rank had not finished it when the fault came."""
    ready = [rank.told["ready"]["at"] for rank in seen.ranks if "ready" in rank.told]
    return len(ready) < len(seen.ranks) or max(ready) > seen.fault_at


def _is_beyond(seen: Observed, rank: int, blamed: int) -> bool:
    """Whether the cut link lies between the two ranks. In the set-up it may be the store, which no
    rank serves, that one side does not reach.
    """
    case = seen.case
    if blamed == -1 and _in_setup(seen):
        return True
    node = case.nodes[case.victim]
    known = 0 <= blamed < len(case.nodes)
    return known and (case.nodes[rank] == node) != (case.nodes[blamed] == node)


def _is_unknown(seen: Observed, error: dict[str, Any]) -> bool:
    """In the set-up over MPI ranks come by a call of MPI's own: it does not say who is missing, and
    of several that have ended, as who has heard of the first does, not which was the first.
    """
    blamed = error["rank"]
    if seen.case.under != "mpirun" or not _in_setup(seen):
        return False
    has_ended = 0 <= blamed < len(seen.ranks) and 0 < seen.ranks[blamed].ended_at < error["at"]
    return bool(blamed == -1 or has_ended)


def _tail(found: RankSeen) -> str:
    lines = [line for line in found.output.splitlines() if line.strip()]
    return " | ".join(lines[-6:])
