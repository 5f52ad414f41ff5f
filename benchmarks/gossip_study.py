"""How well models learn that gossip, for how many bytes: the statistical half of gossip.py.

Owns the candidates, the choice of learning rates and the comparison over seeds. All candidates of
a case see the same data in the same order; each has the learning rate that was best for it on
other seeds. The ranks are simulated (gossip_simulation.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import report
from gossip_simulation import Case, Way, simulate
from hsgd.optim.triggers import Budget, FixedPeriod, JitteredPeriod, RelativeChange

__all__ = ["best_fixed", "compare", "ratios", "study", "ways"]

TUNING_SEEDS = (1001, 1002)
PERIODS = (8, 13, 26, 52)


def ways(case: Case, *, quick: bool = False) -> list[Way]:
    """The candidates. On the hypercube partners fire together, and one exchange serves both; so a
    random topology has twice the period at equal bytes, and rules that fire by themselves half the
    rate.
    """
    steps = case.steps
    chosen = [
        Way("none"),
        Way("synchronous", synchronous=True),
        Way("every-step", lambda _: FixedPeriod(1), "exponential2"),
        Way("fixed-13", lambda _: FixedPeriod(13), "exponential2"),
        Way("budget-13", lambda _: Budget(1 / 13, steps), "exponential2"),
    ]
    if quick:
        return chosen
    chosen += [
        Way("every-step-random", lambda _: FixedPeriod(1), "random"),
        Way("jitter-26-random", lambda seed: JitteredPeriod(26, seed), "random"),
        Way("change-0.1", lambda _: RelativeChange(0.1), "exponential2"),
        Way(
            "budget-13-by-change",
            lambda _: Budget(1 / 26, steps, reserve=4, spend="change"),
            "exponential2",
        ),
        Way(
            "hierarchical-13",
            lambda _: FixedPeriod(13),
            "exponential2",
            group_size=2,
        ),
    ]
    for period in PERIODS:
        if period != 13:
            chosen.append(Way(f"fixed-{period}", _fixed(period), "exponential2"))
            chosen.append(Way(f"budget-{period}", _budget(period, steps), "exponential2"))
    return [*chosen, Way("fixed-26-random", _fixed(26), "random")]


def _fixed(period: int) -> Callable[[int], FixedPeriod]:
    return lambda _: FixedPeriod(period)


def _budget(period: int, steps: int) -> Callable[[int], Budget]:
    return lambda _: Budget(1 / period, steps)


def study(
    case: Case, candidates: Sequence[Way], rates: Sequence[float], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows of results, one per candidate, as they come."""
    name = f"{case.shards}/p{case.ranks}"
    tuning = Case(case.shards, case.ranks, TUNING_SEEDS, case.steps, case.batch, 1)
    for way in candidates:
        begin = time.perf_counter()
        scores = {}
        for lr in rates:
            tried = simulate(tuning, way, lr)
            scores[lr] = statistics.mean(tried.single)
        best = max(scores, key=lambda lr: scores[lr])
        found = simulate(case, way, best)
        row = {
            "case": name,
            "candidate": way.name,
            "lr": best,
            "tuning": {f"{lr:g}": round(score, 2) for lr, score in scores.items()},
            "mbytes": round(statistics.mean(found.bytes) / 1e6, 4),
            "exchanges": statistics.mean(found.messages),
            **{
                key: round(statistics.mean(values), 3)
                for key, values in (
                    ("single", found.single),
                    ("worst", found.worst),
                    ("mean_model", found.mean_model),
                )
            },
            "distance": round(statistics.mean(found.distance), 5),
            "seeds": {
                "single": [round(value, 3) for value in found.single],
                "worst": [round(value, 3) for value in found.worst],
                "mean_model": [round(value, 3) for value in found.mean_model],
                "mbytes": [round(value / 1e6, 4) for value in found.bytes],
            },
            "curve": {
                "mbytes": [round(value / 1e6, 4) for value in found.curve_bytes],
                "single": [round(value, 2) for value in found.curve_single],
            },
        }
        took = time.perf_counter() - begin
        say(f"{name} {way.name}: {row['single']:.2f}% at {row['mbytes']:.1f} MB, {took:.0f} s")
        yield row


def compare(
    rows: Sequence[Mapping[str, Any]], one: str, other: str, key: str = "single"
) -> tuple[float, float]:
    """Mean over seeds of one candidate's points more than the other's, and half of the 95%
    interval.
    """
    by_name = {row["candidate"]: row for row in rows}
    pairs = zip(by_name[one]["seeds"][key], by_name[other]["seeds"][key], strict=True)
    differences = [a - b for a, b in pairs]
    return statistics.mean(differences), report.half_width(differences)


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: bytes of gossip in every step over those of a candidate, and points of accuracy
    that a budget is ahead of the best fixed period of as many bytes or more, up to a tenth more.
    """
    found: dict[str, float] = {}
    for case in dict.fromkeys(row["case"] for row in results):
        rows = [row for row in results if row["case"] == case]
        by_name = {row["candidate"]: row for row in rows}
        every = by_name.get("every-step")
        for name, row in by_name.items():
            if every and row["mbytes"] and name not in ("every-step", "synchronous"):
                found[f"traffic_vs_every_step/{name}/{case}"] = every["mbytes"] / row["mbytes"]
            if every and name.startswith("budget"):
                found[f"points_vs_every_step/{name}/{case}"] = compare(rows, name, "every-step")[0]
            rival = best_fixed(rows, row) if name.startswith("budget") else None
            if rival:
                ahead, error = compare(rows, name, rival)
                found[f"points_vs_fixed/{name}/{case}"] = ahead
                found[f"points_vs_fixed_error/{name}/{case}"] = error
                worst = compare(rows, name, rival, "worst")[0]
                found[f"worst_points_vs_fixed/{name}/{case}"] = worst
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def best_fixed(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str | None:
    """The best fixed or jittered period of about the bytes of `row`."""
    alike = [
        other
        for other in rows
        if other["candidate"].startswith(("fixed", "jitter"))
        and 0.95 * row["mbytes"] <= other["mbytes"] <= 1.15 * row["mbytes"]
    ]
    best = max(alike, key=lambda other: other["single"], default=None)
    return None if best is None else str(best["candidate"])
