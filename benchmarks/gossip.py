"""Gossip: accuracy against bytes over many seeds, and against seconds on slow links.

The two halves are gossip_study.py, which simulates the ranks with the triggers and topologies of
hsgd.optim, and gossip_links.py, which runs hsgd.optim's Gossip itself on virtual nodes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness import report
from harness.stopping import keeping
from hsgd.errors import LaunchError
from studies import gossip_cost, gossip_links, gossip_study
from studies.gossip_simulation import SHARDS, Case

__all__ = ["main"]

EPILOG = """\
"single" is the accuracy of a rank's own model, mean over ranks, "worst" that of the worst rank,
"mean model" that of the mean of all weights, all at the end and on 360 test images. Ranks train an
MLP 64-64-10 with batches of 16; the learning rate falls along a cosine to a tenth, and its start is
the best of --rates for each candidate, on four other seeds, trained on 1150 of the training images
and scored on the other 287. "dirichlet0.1" deals classes to ranks by a Dirichlet distribution of
0.1, "two-classes" gives each rank two pieces of the images in the order of their labels, "same"
deals at random. "-final" is with one average of all models at the end, "-bf16" sends 16 bits,
"change-X" is RelativeChange(X).

Ratios, above 1 is ahead: vs_peer/traffic is bytes of gossip in every step over those of a candidate
(traffic_random: with random peers; traffic_bf16: in 16 bits, of both), vs_peer/time its seconds to
the target accuracy, vs_limit/trigger 5% of a step over the time of measuring the change.
points_vs_... are points of accuracy that a budget is ahead, paired over seeds, and error_vs_...
half of their 95% interval: against every step, the best fixed or jittered period of about as many
bytes in float32 (fixed) and in 16 bits (fixed_bf16), either with an average of all at the end
(fixed_final), and RelativeChange at as many bytes (change), between the two nearest thresholds.

examples:
  python benchmarks/gossip.py --quick
  python benchmarks/gossip.py --json gossip.json --png gossip.png
  python benchmarks/gossip.py --no-study --links 100mbit 1gbit --turns 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when links could not be measured."""
    options = _read(argv)
    torch.set_num_threads(1)
    names = ("seeds", "steps", "rates", "target", "link_steps", "turns")
    found = _Found(options.json, {name: getattr(options, name) for name in names})
    failed = False
    with keeping() as stopped:
        try:
            _run(options, found)
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
    text = "\n".join([*cost_lines(found.cost), *tables(found.studied), *link_tables(found.timed)])
    report.publish(
        *(options, found.document(stopped.code), text),
        lambda _, target: plot(found.studied, found.timed, target),
    )
    return stopped.code or int(failed)


def _run(options: argparse.Namespace, found: _Found) -> None:
    """All measurements, into `found` one by one."""
    begin = time.monotonic()

    def time_is_up() -> bool:
        up = options.limit_s is not None and time.monotonic() - begin > options.limit_s
        if up:
            _say(f"{options.limit_s:g} s are over: the rest is left out")
        return up

    for rows in gossip_cost.measure(gossip_cost.WIDTHS[: 2 if options.quick else None]):
        found.cost += rows
        found.write()
    for shards, ranks in itertools.product(options.shards if options.study else (), options.ranks):
        case = Case(shards, ranks, tuple(range(options.seeds)), options.steps)
        candidates = gossip_study.ways(case, quick=options.quick)
        if options.candidates:
            candidates = [way for way in candidates if way.name in options.candidates]
        for row in gossip_study.study(case, candidates, options.rates, _say):
            found.studied.append(row)
            found.write()
            if time_is_up():
                return
    for rate in options.links:
        earlier = found.timed
        for rows in gossip_links.measure(
            rate, options.nodes, options.target, options.link_steps, options.turns, _say
        ):
            found.timed = earlier + rows
            found.write()
            if time_is_up():
                return


@dataclass
class _Found:
    """What was measured so far; the file has it too, whatever ends the run."""

    target: Path | None
    settings: dict[str, Any]
    cost: list[dict[str, Any]] = field(default_factory=list)
    studied: list[dict[str, Any]] = field(default_factory=list)
    timed: list[dict[str, Any]] = field(default_factory=list)

    def document(self, stopped: int = 0) -> dict[str, Any]:
        compared = gossip_study.ratios(self.studied) | gossip_links.ratios(self.timed)
        compared |= gossip_cost.ratios(self.cost)
        results = self.cost + self.studied + self.timed
        return report.document("gossip", self.settings, compared, results, stopped=stopped)

    def write(self) -> None:
        if self.target is not None:
            report.write_json(self.target, self.document())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cost_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the trigger costs, a line for each model."""
    lines = []
    for (case,), rows in report.grouped(results, "case").items():
        medians = ", ".join(f"{row['candidate']} {row['median_us']:.0f} us" for row in rows)
        lines.append(f"{case}: {medians}")
    return lines


def tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The study as text for a terminal."""
    columns: dict[str, Any] = {
        "": "candidate",
        "lr": lambda row: f"{row['lr']:g}",
        "MB of all": lambda row: f"{row['mbytes']:.2f}",
        "single %": lambda row: f"{row['single']:.2f}",
        "worst %": lambda row: f"{row['worst']:.2f}",
        "mean model %": lambda row: f"{row['mean_model']:.2f}",
        "distance": lambda row: f"{row['distance']:.4f}",
    }
    parts = []
    for (case,), rows in report.grouped(results, "case").items():
        parts.append(f"{case}\n" + report.rows_table(rows, columns))
        for row in rows:
            if row["candidate"].startswith("budget"):
                parts += _comparisons(rows, row)
    return parts


def _comparisons(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[str]:
    """A line for each rival of a budget."""
    name, lines = row["candidate"], []
    for kind in gossip_study.RIVALS:
        rival = gossip_study.best_alike(rows, row, kind)
        if rival:
            ahead, error = gossip_study.compare(rows, name, rival)
            lines.append(f"{name} - {rival}: {ahead:+.2f} +- {error:.2f} points")
    change = gossip_study.compare_with_curve(rows, name, "change")
    if change:
        lines.append(f"{name} - change at its bytes: {change[0]:+.2f} +- {change[1]:.2f} points")
    return lines


def link_tables(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The seconds on slow links as text for a terminal."""
    parts = []
    for (case,), rows in report.grouped(results, "case").items():
        columns: dict[str, Any] = {
            "": "candidate",
            f"s to {rows[0]['target']:g}%": lambda row: (
                f"{row['seconds']:.2f}" if row["reached"] else "not reached"
            ),
            "steps": lambda row: f"{row['steps']:g}",
            "accuracy %": lambda row: f"{row['accuracy']:.1f}",
            "MB of all": lambda row: f"{row['mbytes']:.2f}",
        }
        parts.append(f"{case}\n" + report.rows_table(rows, columns))
    return parts


def plot(
    studied: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]], target: Path
) -> None:
    """Accuracy against bytes, and against seconds, a panel for each case."""
    panels = [(_draw_bytes, *case) for case in report.grouped(studied, "case").items()]
    panels += [(_draw_seconds, *case) for case in report.grouped(timed, "case").items()]
    size = (3.6 * len(panels) + 1, 4)
    with report.figure(target, 1, max(1, len(panels)), size=size) as axes:
        for axis, (draw, (case,), rows) in zip(axes[0], panels, strict=False):
            draw(axis, rows)
            axis.set_title(case, fontsize=10)
            axis.grid(True, color="#dddddd", linewidth=0.6)
            axis.legend(fontsize=7, frameon=False, loc="lower right")
        axes[0][0].set_ylabel("test accuracy, %")


_OFF_THE_LINE = ("-random", "-final", "-bf16")  # another topology or wire; final is "mean model"


def _draw_bytes(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One point per candidate of a family, at the end of the training."""
    for family, colour in (("fixed", "#d94801"), ("budget", "#08519c"), ("change", "#238b45")):
        mine = [row for row in rows if row["candidate"].startswith(family)]
        mine = [row for row in mine if not row["candidate"].endswith(_OFF_THE_LINE)]
        mine.sort(key=lambda row: row["mbytes"])
        x = [row["mbytes"] for row in mine]
        for what, style in (("single", "o-"), ("mean_model", "x:")):
            label = f"{family}, {'own model' if what == 'single' else 'mean model'}"
            axis.plot(x, [row[what] for row in mine], style, color=colour, label=label)
    for row in rows:
        if row["candidate"] == "every-step":
            axis.plot([row["mbytes"]], [row["single"]], "k*", label="every step")
    axis.set_xscale("log")
    axis.set_xlabel("MB sent by all ranks")


def _draw_seconds(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per candidate, up to the target."""
    for row in rows:
        x, y = [point[1] for point in row["curve"]], [point[2] for point in row["curve"]]
        axis.plot(x, y, label=row["candidate"], linewidth=1.4)
    axis.set_xscale("log")
    axis.set_xlabel("seconds")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what --quick changes."""
    parser = report.argument_parser(
        *(str(__doc__).splitlines()[0], EPILOG),
        quick="few seeds, steps and candidates",
        png="draw accuracy against bytes",
    )
    add = parser.add_argument
    add("--seeds", type=int, help="seeds of each candidate (default 20)")
    add("--steps", type=int, help="local steps (default 1400)")
    add("--ranks", type=int, nargs="+", help="default 4 8")
    add("--shards", nargs="+", choices=SHARDS, help="default all")
    add("--candidates", nargs="+", help="of the study; default all")
    add("--rates", type=float, nargs="+", help="learning rates to choose from")
    add("--no-study", dest="study", action="store_false", help="links only")
    add("--links", nargs="*", help="default 100mbit 1gbit; none with --quick")
    add("--nodes", type=int, default=4, help="virtual nodes, of one rank each")
    add("--target", type=float, default=85.0, help="accuracy on links, percent")
    add("--link-steps", type=int, default=260, help="most steps on links")
    add("--turns", type=int, default=2, help="of each candidate on links")
    add("--limit-s", type=float, help="begin nothing new after so long, and keep what there is")
    options = report.parse(parser, argv)
    quick = options.quick
    if options.links is None:
        options.links = [] if quick else ["100mbit", "1gbit"]
    options.seeds = options.seeds or (2 if quick else 20)
    options.steps = options.steps or (150 if quick else 1400)
    options.ranks = options.ranks or ([4] if quick else [4, 8])
    options.shards = options.shards or (["two-classes"] if quick else list(SHARDS))
    options.rates = options.rates or ([0.4] if quick else [0.2, 0.4, 0.8, 1.6])
    return options


if __name__ == "__main__":
    sys.exit(main())
