"""What the runs of the programs say: losses compared, ratios, a table and a plot.

A row of results is one program over one candidate: gloo, hsgd, or alone, which is one worker's part
of the work without communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report

__all__ = ["difference", "median_step_us", "plot", "ratios", "rows_of", "table"]

WARM_UP = 5  # steps that no median has
NOISE = 0.01  # of a step alone: less exposed communication than this is not told apart from it
TELLING = 0.05  # of gloo's step: less exposed communication is not worth a ratio

Row = Mapping[str, Any]


def difference(mine: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of losses; infinite where they are not as many, or none."""
    if len(mine) != len(other) or not mine:
        return float("inf")
    pairs = zip(mine, other, strict=True)
    found = [0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    return float("inf") if any(value != value for value in found) else max(found)


def median_step_us(step_s: Sequence[float]) -> float:
    """Of the steps after the first ones; a program that gives fewer figures gives means."""
    return 1e6 * statistics.median(step_s[WARM_UP:] or step_s)


def rows_of(
    program: str, steps_us: Mapping[str, Sequence[float]], losses_differ: float
) -> list[dict[str, Any]]:
    """The rows of one program from the medians of its runs, by candidate."""
    medians = {name: statistics.median(values) for name, values in steps_us.items()}
    rows = []
    for name, median in medians.items():
        row = {"program": program, "candidate": name, "median_us": _rounded(median)}
        row["runs_us"] = [_rounded(value) for value in steps_us[name]]
        if name != "alone":
            row["exposed_us"] = _rounded(median - medians["alone"])
            row["losses_differ"] = losses_differ
        rows.append(row)
    return rows


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """vs_peer/PROGRAM: gloo's step over hsgd's; vs_peer/PROGRAM_exposed: the same of exposed
    communication, where gloo's is worth it; hsgd's counts at least as much as noise.
    """
    found = {}
    for program, here in _by_program(rows).items():
        gloo, hsgd, alone = here["gloo"], here["hsgd"], here["alone"]
        found[f"vs_peer/{program}"] = _rounded(gloo["median_us"] / hsgd["median_us"])
        if gloo["exposed_us"] > TELLING * gloo["median_us"]:
            least = max(hsgd["exposed_us"], NOISE * alone["median_us"])
            found[f"vs_peer/{program}_exposed"] = _rounded(gloo["exposed_us"] / least)
    return found


def table(rows: Sequence[Row]) -> str:
    """Times in milliseconds per step, right-aligned."""
    header = ["program", "alone", "gloo", "hsgd", "gloo/hsgd", "exposed gloo", "exposed hsgd"]
    header += ["ratio", "losses differ"]
    ahead, lines = ratios(rows), []
    for program, here in _by_program(rows).items():
        both = (here["gloo"], here["hsgd"])
        cells = [program, *(_ms(here[name]["median_us"]) for name in ("alone", "gloo", "hsgd"))]
        cells += [f"{ahead[f'vs_peer/{program}']:.2f}", *(_ms(row["exposed_us"]) for row in both)]
        exposed = ahead.get(f"vs_peer/{program}_exposed")
        cells.append("-" if exposed is None else f"{exposed:.1f}")
        lines.append([*cells, f"{here['hsgd']['losses_differ']:.2g}"])
    return report.table(header, lines)


def plot(rows: Sequence[Row], target: Path) -> None:
    """A group of bars for each program: its step, as a multiple of the step alone, into a PNG."""
    programs = _by_program(rows)
    with report.figure(target, size=(1.3 * len(programs) + 2, 4)) as ((panel,),):
        for shift, name in ((-0.2, "gloo"), (0.2, "hsgd")):
            steps = [here[name]["median_us"] for here in programs.values()]
            alone = [here["alone"]["median_us"] for here in programs.values()]
            heights = [step / least for step, least in zip(steps, alone, strict=True)]
            places = [place + shift for place in range(len(programs))]
            bars = panel.bar(places, heights, 0.38, label=name)
            panel.bar_label(bars, [_ms(step) for step in steps], fontsize=7)
        panel.axhline(1, color="black", linewidth=0.8, linestyle=":", label="no communication")
        panel.set_xticks(range(len(programs)), list(programs), rotation=25, fontsize=8)
        panel.set_ylabel("step / step alone (bars: ms)")
        panel.legend(fontsize=8, frameon=False)


def _by_program(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    programs = report.grouped(rows, "program").items()
    return {name: {row["candidate"]: row for row in here} for (name,), here in programs}


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
