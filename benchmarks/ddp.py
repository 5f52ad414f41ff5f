"""Exposed communication of DistributedDataParallel: backend hsgd against gloo.

Owns the comparison. The gradients are there from the start, so that a step is DDP and nothing else,
and there is nothing for communication to hide behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from harness import report
from harness.layouts import JobLayout, read_layout
from harness.stopping import Stopped, keeping
from harness.worker_jobs import WorkerJobs
from lars import MODELS
from workers.ddp_worker import work

__all__ = ["main"]

JOB_LIMIT_S = 600.0
CANDIDATES = {"hsgd": "hsgd", "gloo": "peer", "nothing": "limit"}
NOTES = """\
A step is a backward pass that takes gradients from memory, through DistributedDataParallel with
gradient_as_bucket_view. "nothing" is the same step over a backend that sends nothing: what DDP
itself costs. Exposed communication is the median of a step less that of "nothing". Candidates take
turns, one step each; the time of a step is that of its slowest rank. The gradients of each
candidate are compared with the average over the ranks, and must be equal on all ranks.

Ranks of virtual nodes (--nodes) meet as torchrun's workers do, without MPI; --np is then that of
the layout.

examples:
  python benchmarks/ddp.py --quick
  python benchmarks/ddp.py --nodes 2x2@10gbit 2x2@1gbit --json nodes.json
  python benchmarks/ddp.py --json ddp.json --png ddp.png
"""


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """vs_peer/MODEL: exposed communication over gloo to that over hsgd, where neither hides in the
    noise; vs_peer_step/MODEL: of whole steps; vs_limit_step/MODEL: steps over "nothing" to those
    over hsgd. On virtual nodes MODEL is MODEL/LAYOUT.
    """
    found = {}
    for case in dict.fromkeys(map(_case, rows)):
        here = {row["candidate"]: row for row in rows if _case(row) == case}
        limit = here["nothing"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_limit_step/{case}"] = float(f"{limit:.4g}")
        ours, theirs = (here[name].get("exposed_us", 0.0) for name in ("hsgd", "gloo"))
        if ours > 0 and theirs > 0:
            found[f"vs_peer/{case}"] = float(f"{theirs / ours:.4g}")
        step = here["gloo"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_peer_step/{case}"] = float(f"{step:.4g}")
    return found


def _case(row: dict[str, Any]) -> str:
    return f"{row['model']}/{row['layout']}" if "layout" in row else str(row["model"])


def measure(
    models: list[str], size: int, rounds: int, layouts: Sequence[JobLayout] = ()
) -> tuple[list[dict[str, Any]], list[str], Stopped]:
    """Rows and failures of the ranks of this machine, or of layouts, until they end or somebody
    ends the run. Raises what a rank of this machine raised.
    """
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder, keeping() as stopped:
        if not layouts:
            out = Path(folder, "out.json")
            try:
                _run_here(size, Path(folder, "store"), models, rounds, out)
            finally:
                if out.exists():
                    found = json.loads(out.read_text())
                    rows, failures = _rows(found, {"np": size}), found["failures"]
        jobs = WorkerJobs("ddp_worker", Path(folder), JOB_LIMIT_S)
        for layout in layouts:
            # As torchrun starts workers, which use no MPI even where mpirun is around them.
            environment = {"TORCHELASTIC_RUN_ID": "ddp", "HSGD_INTERFACES": "eth0"}
            words = [str(Path(folder, f"store-{layout.name}")), str(rounds), *models]
            found = jobs.run(layout, words, environment=environment)
            if found is not None:
                rows += _rows(found, {"np": layout.ranks, "layout": layout.name})
                failures += found["failures"]
        failures += jobs.failures
    return rows, failures, stopped


def _run_here(size: int, store: Path, models: list[str], rounds: int, out: Path) -> None:
    args = (size, str(store), models, rounds, str(out))
    ranks = torch.multiprocessing.spawn(work, args, nprocs=size, join=False)
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def _rows(found: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for model, by_candidate in found["seconds"].items():
        figures = {name: report.statistics(values) for name, values in by_candidate.items()}
        for name, values in figures.items():
            row = {"model": model, **place, "candidate": name, "kind": CANDIDATES[name], **values}
            if name != "nothing":
                row["exposed_us"] = values["median_us"] - figures["nothing"]["median_us"]
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where gradients were wrong."""
    parser = argparse.ArgumentParser(
        description="Measure the exposed communication of DistributedDataParallel.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer rounds: under a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    add("--png", type=Path, metavar="FILE", help="plot the medians there")
    add("--models", nargs="+", choices=MODELS, default=["resnet50", "1000x256"])
    add("--np", type=int, default=2, help="ranks (default 2)")
    add("--nodes", nargs="+", default=[], metavar="LAYOUT", help="virtual nodes, like 2x2@10gbit")
    add("--rounds", type=int, help="steps of each candidate (default 60)")
    options = parser.parse_args(argv)
    report.check_targets(parser, options.json, options.png)
    rounds = options.rounds or (15 if options.quick else 60)
    if rounds < 1 or options.np < 1:
        parser.error("--rounds and --np: 1 or more")
    try:
        layouts = [read_layout(text) for text in options.nodes]
    except ValueError as error:
        parser.error(str(error))
    rows, failures, stopped = measure(options.models, options.np, rounds, layouts)
    document = {
        "meta": {
            **report.facts("ddp"),
            "settings": {"rounds": rounds, "np": options.np, "nodes": options.nodes},
            "interrupted": bool(stopped.code),
        },
        "ratios": ratios(rows),
        "failures": failures,
        "results": rows,
    }
    _show(document)
    if options.json:
        report.write_json(options.json, document)
    if options.png and rows:
        heights = {"ms per step": lambda row: row["median_us"] / 1e3}
        report.plot_bars(
            rows, options.png, heights, by=("model", "layout") if options.nodes else ("model", "np")
        )
    return stopped.code or int(bool(failures))


def _show(document: dict[str, Any]) -> None:
    lines = []
    for case in dict.fromkeys(map(_case, document["results"])):
        here = {r["candidate"]: r for r in document["results"] if _case(r) == case}
        steps = [f"{here[name]['median_us'] / 1e3:.2f}" for name in CANDIDATES]
        exposed = [f"{here[name]['exposed_us'] / 1e3:.2f}" for name in ("hsgd", "gloo")]
        ahead = document["ratios"].get(f"vs_peer/{case}")
        lines.append([case, *steps, *exposed, "-" if ahead is None else f"{ahead:.2f}"])
    header = ["model", *CANDIDATES, "exposed hsgd", "exposed gloo", "ahead"]
    print("one step, median milliseconds")
    print(report.table(header, lines))
    for line in document["failures"]:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
