"""What faults cost a training, from the notes of its ranks: when survivors computed again, how many
steps they did again, and what it took to take a new rank in.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from studies.recovery_jobs import Fault, RankNotes

__all__ = ["costs_of_faults", "costs_of_joins", "pace", "plot", "ratios", "tables"]

KINDS = {"kill": "a rank is killed", "stop": "a rank stands still", "node": "a node is lost"}
Rows = Sequence[Mapping[str, Any]]
Pairs = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
SCORES = {"digits": "test images right, %", "gpt": "test loss, nats per character"}


def _worlds(notes: Sequence[RankNotes]) -> dict[int, list[tuple[RankNotes, float, float, int]]]:
    """Per world whose ranks made a step: rank, times of its first and last one, the last step."""
    found: dict[int, list[tuple[RankNotes, float, float, int]]] = {}
    for note in notes:
        for world in dict.fromkeys(step[0] for step in note.steps):
            own = [step for step in note.steps if step[0] == world]
            found.setdefault(world, []).append((note, own[0][2], own[-1][2], own[-1][1]))
    return dict(sorted(found.items()))


def costs_of_faults(notes: Sequence[RankNotes], faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Per fault that was overcome: seconds until survivors entered the training again, and until
    they ended a step, and the steps that were done again.

    A world without the victims, in which a step was made after the fault: that is when it was
    overcome.
    """
    worlds, found = _worlds(notes), []
    for fault in faults:
        for world, members in worlds.items():
            first_s = min(first for _, first, _, _ in members)
            there = {(note.host, note.pid) for note, *_ in members}
            gone = {(fault.host, pid) for pid in fault.pids}
            if world <= fault.world or first_s < fault.time_s or there & gone:
                continue
            entries = [e for note, *_ in members for e in note.entries if e.world == world]
            reached = max(
                last for number, others in worlds.items() if number < world for *_, last in others
            )
            found.append(
                {
                    "kind": fault.kind,
                    "entered_s": min(entry.time_s for entry in entries) - fault.time_s,
                    "recovered_s": first_s - fault.time_s,
                    "steps_again": max(reached - entries[0].step, 0),
                    "size_before": fault.size,
                    "size_after": entries[0].size,
                }
            )
            break
    return found


def costs_of_joins(notes: Sequence[RankNotes], faults: Sequence[Fault]) -> list[float]:
    """Seconds from the last step of a world to the first of the next one, where no fault came
    between: new ranks were taken in.
    """
    worlds = list(_worlds(notes).items())
    found = []
    for (_, before), (_, after) in itertools.pairwise(worlds):
        begin = min(first for _, first, _, _ in before)
        last = max(each for _, _, each, _ in before)
        first = min(each for _, each, _, _ in after)
        if not any(begin <= fault.time_s <= first for fault in faults):
            found.append(first - last)
    return found


def pace(notes: Sequence[RankNotes]) -> tuple[float, float]:
    """Seconds from the first entry to the last step, and of a step, the median."""
    times = [step[2] for note in notes for step in note.steps]
    entered = min(entry.time_s for note in notes for entry in note.entries)
    gaps = [
        after[2] - before[2]
        for note in notes
        for before, after in itertools.pairwise(note.steps)
        if after[0] == before[0]
    ]
    return max(times) - entered, statistics.median(gaps)


def lost_s(row: Mapping[str, Any]) -> list[float]:
    """Of each fault of a row: until computing goes on, with the steps that are done again."""
    return [each["recovered_s"] + each["steps_again"] * row["step_s"] for each in row["overcome"]]


def _cases(rows: Rows) -> Iterator[tuple[str, str, Rows, Pairs]]:
    """Tasks and layouts, their disturbed trainings, and those that have an undisturbed one of the
    same seed, with it.
    """
    plain = {(r["task"], r["seed"]): r for r in rows if r["candidate"] == "undisturbed"}
    disturbed = [row for row in rows if row["candidate"] == "disturbed"]
    for (task, layout), here in report.grouped(disturbed, "task", "layout").items():
        pairs = [(row, plain[task, row["seed"]]) for row in here if (task, row["seed"]) in plain]
        yield task, layout, here, pairs


def ratios(rows: Rows) -> dict[str, float]:
    """difference: score less that of the undisturbed training of the same seed, the mean.
    vs_undisturbed/time: time of the undisturbed one over that of the disturbed one, of all.
    lost_s: per fault. overcome: the share of faults.
    """
    found: dict[str, float] = {}
    for task, layout, here, pairs in _cases(rows):
        case = f"{task}/{layout}"
        if pairs:
            gaps = [ours["score"] - theirs["score"] for ours, theirs in pairs]
            found[f"difference/{case}"] = statistics.fmean(gaps)
            found[f"half_width/{case}"] = report.half_width(gaps)
            whole = sum(theirs["seconds"] for _, theirs in pairs)
            found[f"vs_undisturbed/time/{case}"] = whole / sum(o["seconds"] for o, _ in pairs)
        lost = [value for row in here for value in lost_s(row)]
        done = sum(row["faults"] for row in here)
        if lost:
            found[f"overcome/{case}"] = len(lost) / done
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                found[f"lost_s_{name}/{case}"] = report.percentile(lost, share)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def tables(rows: Rows) -> str:
    """Faults by kind, and scores, as text."""
    costs, scores = [], []
    for task, layout, here, pairs in _cases(rows):
        each = [
            (cost, lost)
            for row in here
            for cost, lost in zip(row["overcome"], lost_s(row), strict=True)
        ]
        for kind, words in {**KINDS, "": "all"}.items():
            some = [pair for pair in each if not kind or pair[0]["kind"] == kind]
            if some:
                again = [cost["recovered_s"] for cost, _ in some]
                costs.append([task, layout, words, str(len(some)), *_seconds(again)])
                costs[-1] += [*_seconds([lost for _, lost in some])]
                costs[-1].append(f"{statistics.median(c['steps_again'] for c, _ in some):g}")
        joins = [value for row in here for value in row["joins_s"]]
        if joins:
            seconds = [*_seconds(joins), "", "", ""]
            costs.append([task, layout, "ranks join", str(len(joins)), *seconds, "0"])
        if pairs:
            scores.append([task, layout, *_scores(pairs)])
    header = ["task", "layout", "", "faults", "again after p50", "p99", "max s"]
    header += ["lost p50", "p99", "max s", "steps again"]
    parts = [report.table(header, costs)] if costs else []
    header = ["task", "layout", "trainings", "score", "undisturbed", "difference"]
    header += ["time, s", "und."]
    parts += [report.table(header, scores)] if scores else []
    return "\n\n".join(parts)


def _seconds(values: Sequence[float]) -> list[str]:
    found = (report.percentile(values, 0.5), report.percentile(values, 0.99), max(values))
    return [f"{value:.2f}" for value in found]


def _scores(pairs: Pairs) -> list[str]:
    ours, theirs = ([pair[place]["score"] for pair in pairs] for place in (0, 1))
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    means = [f"{statistics.fmean(values):.3f}" for values in (ours, theirs)]
    times = [f"{statistics.fmean(p[place]['seconds'] for p in pairs):.0f}" for place in (0, 1)]
    gap = f"{statistics.fmean(gaps):+.3f} ± {report.half_width(gaps):.3f}"
    return [str(len(pairs)), *means, gap, *times]


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Seconds lost by each fault, and scores beside those of undisturbed trainings."""
    cases = list(_cases(document["results"]))
    colours = dict(zip(KINDS, ("#4292c6", "#d94801", "#238b45"), strict=True))
    size = (4 + 3 * len(cases), 4)
    with report.figure(target, 1, 1 + len(cases), size=size) as ((faults, *axes),):
        for kind, words in KINDS.items():
            points = [
                (f"{task}\n{layout}", lost)
                for task, layout, here, _ in cases
                for row in here
                for cost, lost in zip(row["overcome"], lost_s(row), strict=True)
                if cost["kind"] == kind
            ]
            if points:
                x, y = zip(*points, strict=True)
                faults.plot(x, y, "o", color=colours[kind], label=words, alpha=0.6)
        faults.set(title="seconds lost by a fault", ylim=(0, None))
        faults.legend(fontsize=8, frameon=False)
        for axis, (task, layout, _, pairs) in zip(axes, cases, strict=True):
            for place, label in ((1, "undisturbed"), (0, "disturbed")):
                seeds = [pair[0]["seed"] for pair in pairs]
                scores = [pair[place]["score"] for pair in pairs]
                axis.plot(seeds, scores, "o", label=label, alpha=0.7)
            axis.set(title=f"{task}, {layout}", xlabel="seed", ylabel=SCORES[task])
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend(fontsize=8, frameon=False)
