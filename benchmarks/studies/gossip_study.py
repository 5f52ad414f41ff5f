"""How well models learn that gossip, for how many bytes: the statistical half of gossip.py.

All candidates of a case see the same data in the same order. Each has the learning rate that was
best for it on other seeds, trained on a part of the training images and scored on the rest of them:
no test image has a say. The ranks are simulated (gossip_simulation.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness import report
from hsgd.optim.triggers.communication_triggers import (
    Budget,
    FixedPeriod,
    JitteredPeriod,
    RelativeChange,
)
from studies.gossip_simulation import Case, Outcome, Way, simulate

__all__ = ["RIVALS", "best_alike", "compare", "compare_with_curve", "ratios", "study", "ways"]

TUNING_SEEDS = (1001, 1002, 1003, 1004)
PERIODS = (8, 13, 26, 52)
THRESHOLDS = (0.03, 0.05, 0.07, 0.1, 0.15, 0.22, 0.33)
PERIODS_BF16 = (6, 13)
_ADDED = ("-bf16", "-final")  # to the name of a period: what it sends, and how it ends
RIVALS: dict[str, Callable[[str], bool]] = {
    "fixed": lambda name: name.startswith(("fixed", "jitter")) and not name.endswith(_ADDED),
    "fixed_bf16": lambda name: name.startswith("fixed") and name.endswith("-bf16"),
    "fixed_final": lambda name: name.startswith("fixed") and name.endswith("-final"),
    "average_final": lambda name: name.startswith("average") and name.endswith("-final"),
}
"""What a budget is compared with at equal bytes: the ranks' own models of a period in float32, of
one in 16 bits, those of either after one average of all at the end, and averages of all, now and
then and at the end."""


def ways(case: Case, *, quick: bool = False) -> list[Way]:
    """The candidates. On the hypercube partners fire together, and one exchange serves both; so a
    random topology has twice the period at equal bytes, and rules that fire by themselves half the
    rate.
    """
    steps = case.steps
    chosen = [
        Way("none"),
        Way("synchronous", synchronous=True),
        Way("every-step", _fixed(1), "exponential2"),
        Way("fixed-13", _fixed(13), "exponential2"),
        Way("budget-13", _budget(13, steps), "exponential2"),
    ]
    if quick:
        return [*chosen, Way("change-0.1", _change(0.1), "exponential2")]
    chosen += [
        Way("every-step-random", _fixed(1), "random"),
        Way("fixed-26-random", _fixed(26), "random"),
        Way("jitter-13", lambda seed: JitteredPeriod(13, seed // 1000), "exponential2"),
        Way("jitter-26-random", lambda seed: JitteredPeriod(26, seed), "random"),
        Way(
            "budget-13-by-change",
            lambda _: Budget(1 / 26, steps, reserve=4, spend="change"),
            "exponential2",
        ),
        Way("hierarchical-13", _fixed(13), "exponential2", group_size=2),
    ]
    # An average of all costs 2 (p - 1) / p of a model per rank, an exchange in pairs one.
    dear = 2 * (case.ranks - 1) / case.ranks
    chosen += [Way(f"average-{round(k * dear)}", average_every=round(k * dear)) for k in PERIODS]
    for period in PERIODS:
        if period != 13:
            chosen.append(Way(f"fixed-{period}", _fixed(period), "exponential2"))
            chosen.append(Way(f"budget-{period}", _budget(period, steps), "exponential2"))
    chosen += [Way(f"change-{x:g}", _change(x), "exponential2") for x in THRESHOLDS]
    narrow = [Way("every-step-bf16", _fixed(1))]
    narrow += [Way(f"fixed-{period}-bf16", _fixed(period)) for period in PERIODS_BF16]
    narrow += [Way(f"budget-{period}-bf16", _budget(period, steps)) for period in (6.5, 13)]
    chosen += [replace(way, topology="exponential2", wire=torch.bfloat16) for way in narrow]
    finals = ("fixed", "change", "average")  # a budget has its reserve for that
    return chosen + [
        replace(way, name=f"{way.name}-final", final_average=True)
        for way in chosen
        if way.name.startswith(finals) and not way.name.endswith("-random")
    ]


def _fixed(period: int) -> Callable[[int], FixedPeriod]:
    return lambda _: FixedPeriod(period)


def _budget(period: float, steps: int) -> Callable[[int], Budget]:
    return lambda _: Budget(1 / period, steps)


def _change(threshold: float) -> Callable[[int], RelativeChange]:
    return lambda _: RelativeChange(threshold)


def study(
    case: Case, candidates: Sequence[Way], rates: Sequence[float], say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows of results, one per candidate, as they come."""
    name = f"{case.shards}/p{case.ranks}"
    tuning = replace(case, seeds=TUNING_SEEDS, tuning=True)
    known: dict[tuple[Case, Way, float], Outcome] = {}

    def run(on: Case, way: Way, lr: float) -> Outcome:
        """A final average costs no training of its own."""
        trained = replace(way, name="", final_average=False)
        if (on, trained, lr) not in known:
            known[on, trained, lr] = simulate(on, trained, lr)
        found = known[on, trained, lr]
        return found.averaged(on) if way.final_average else found

    for way in candidates:
        begin = time.perf_counter()
        scores = {lr: statistics.mean(run(tuning, way, lr).single) for lr in rates}
        best = max(scores, key=lambda lr: scores[lr])
        row = _row(name, way, best, run(case, way, best))
        row["tuning"] = {f"{lr:g}": round(score, 2) for lr, score in scores.items()}
        took = time.perf_counter() - begin
        say(f"{name} {way.name}: {row['single']:.2f}% at {row['mbytes']:.1f} MB, {took:.0f} s")
        yield row


def _row(case: str, way: Way, lr: float, found: Outcome) -> dict[str, Any]:
    by_seed = {
        "single": found.single,
        "worst": found.worst,
        "mean_model": found.mean_model,
        "mbytes": [sent / 1e6 for sent in found.bytes],
    }
    means = {key: round(statistics.mean(values), 4) for key, values in by_seed.items()}
    return {
        "case": case,
        "candidate": way.name,
        "lr": lr,
        **means,
        "exchanges": statistics.mean(found.messages),
        "distance": round(statistics.mean(found.distance), 5),
        "seeds": {key: [round(v, 4) for v in values] for key, values in by_seed.items()},
    }


def compare(
    rows: Sequence[Mapping[str, Any]], one: str, other: str, key: str = "single"
) -> tuple[float, float]:
    """Mean over seeds of one candidate's points more than the other's, and half of the 95%
    interval.
    """
    by_name = {row["candidate"]: row for row in rows}
    return _paired(by_name[one]["seeds"][key], by_name[other]["seeds"][key])


def _paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return statistics.mean(differences), report.half_width(differences)


def compare_with_curve(
    rows: Sequence[Mapping[str, Any]], one: str, family: str, key: str = "single"
) -> tuple[float, float] | None:
    """As compare(), with what the candidates "FAMILY-..." would have at the bytes of `one`: seed by
    seed between the two of fewer and of more bytes, on a logarithmic scale. None: there are none.
    """
    row = next(row for row in rows if row["candidate"] == one)
    line = sorted(
        (
            other
            for other in rows
            if other["candidate"].startswith(f"{family}-")
            and not other["candidate"].endswith("-final")
        ),
        key=lambda other: float(other["mbytes"]),
    )
    below = [other for other in line if other["mbytes"] <= row["mbytes"]]
    above = [other for other in line if other["mbytes"] >= row["mbytes"]]
    if not below or not above or not row["mbytes"]:
        return None
    low, high = below[-1], above[0]
    span = math.log(high["mbytes"] / low["mbytes"])
    share = math.log(row["mbytes"] / low["mbytes"]) / span if span > 0 else 0.0
    pairs = zip(low["seeds"][key], high["seeds"][key], strict=True)
    return _paired(row["seeds"][key], [a + share * (b - a) for a, b in pairs])


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: bytes of gossip in every step over those of a candidate, and points of accuracy
    that a budget is ahead of others of as many bytes.
    """
    found: dict[str, float] = {}
    for (case,), rows in report.grouped(results, "case").items():
        by_name = {row["candidate"]: row for row in rows}
        for every in ("every-step", "every-step-random", "every-step-bf16"):
            suffix = every.removeprefix("every-step").replace("-", "_")
            for name, row in by_name.items() if every in by_name else ():
                if suffix == "_bf16" and "-bf16" not in name:
                    continue
                if row["mbytes"] and name not in (every, "synchronous"):
                    ratio = by_name[every]["mbytes"] / row["mbytes"]
                    found[f"vs_peer/traffic{suffix}/{name}/{case}"] = ratio
                if name.startswith("budget"):
                    _note(found, f"every_step{suffix}/{name}/{case}", compare(rows, name, every))
        for name, row in by_name.items():
            if not name.startswith("budget"):
                continue
            for kind in RIVALS:
                rival = best_alike(rows, row, kind)
                if rival:
                    _note(found, f"{kind}/{name}/{case}", compare(rows, name, rival))
                    worst = compare(rows, name, rival, "worst")
                    _note(found, f"{kind}_worst/{name}/{case}", worst)
            _note(found, f"change/{name}/{case}", compare_with_curve(rows, name, "change"))
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def _note(found: dict[str, float], key: str, difference: tuple[float, float] | None) -> None:
    if difference is not None:
        found[f"points_vs_{key}"], found[f"error_vs_{key}"] = difference


def best_alike(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], kind: str) -> str | None:
    """The best of RIVALS[kind] that has about the bytes of `row`, or more, up to 15%."""
    alike = [
        other
        for other in rows
        if RIVALS[kind](other["candidate"])
        and 0.95 * row["mbytes"] <= other["mbytes"] <= 1.15 * row["mbytes"]
    ]
    best = max(alike, key=lambda other: float(other["single"]), default=None)
    return None if best is None else str(best["candidate"])
