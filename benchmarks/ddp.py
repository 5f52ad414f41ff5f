"""Exposed communication of DistributedDataParallel: backend hsgd against gloo.

Owns the comparison. The gradients are there from the start, so that a step is DDP and nothing else,
and there is nothing for communication to hide behind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import hsgd.c10d
from harness import report
from harness.stopping import Stopped, keeping
from lars import MODELS, Shapes

__all__ = ["main"]

LIMIT = timedelta(seconds=60)
CANDIDATES = {"hsgd": "hsgd", "gloo": "peer", "nothing": "limit"}
NOTES = """\
A step is a backward pass that takes gradients from memory, through DistributedDataParallel with
gradient_as_bucket_view. "nothing" is the same step over a backend that sends nothing: what DDP
itself costs. Exposed communication is the median of a step less that of "nothing". Candidates take
turns, one step each; the time of a step is that of its slowest rank. The gradients of each
candidate are compared with the average over the ranks, and must be equal on all ranks.

examples:
  python benchmarks/ddp.py --quick
  python benchmarks/ddp.py --json ddp.json --png ddp.png
"""


class _Given(torch.autograd.Function):
    """A function whose gradients are what somebody gave it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


class _Model(torch.nn.Module):
    def __init__(self, shapes: Shapes, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.randn(shape, generator=draw) for shape in shapes]

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = _Given.apply(self.gradients, *self.weights)
        return result


class _Done(dist.Work):  # type: ignore[misc]
    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = LIMIT) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Nothing(dist.ProcessGroup):  # type: ignore[misc]
    """Collectives that send nothing and have ended when they begin."""

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        return _Done(tensors)

    broadcast = allreduce

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        for parts, source in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(source)
        return _Done(outputs)


def _create_nothing(store: Any, rank: int, size: int, limit: timedelta) -> _Nothing:
    return _Nothing(rank, size)


def _worker(rank: int, size: int, store: str, models: list[str], rounds: int, out: str) -> None:
    """One rank: seconds of each step by model and candidate, of the slowest rank, into `out`."""
    torch.set_num_threads(1)
    hsgd.c10d.register()
    dist.Backend.register_backend("nothing", _create_nothing, devices="cpu")
    file = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=LIMIT)
    groups: dict[str, Any] = {
        "hsgd": dist.new_group(backend="hsgd", timeout=LIMIT),
        "gloo": dist.group.WORLD,
        "nothing": dist.new_group(backend="nothing", timeout=LIMIT),
    }
    found: dict[str, Any] = {"seconds": {}, "failures": []}
    for name in models:
        steps = {}
        for candidate, group in groups.items():
            model = DistributedDataParallel(
                _Model(MODELS[name](), rank), process_group=group, gradient_as_bucket_view=True
            )
            steps[candidate] = model
        seconds = torch.zeros(len(steps), rounds, dtype=torch.float64)
        order = list(enumerate(steps.values()))
        for turn in range(-3, rounds):  # DDP rebuilds its buckets after the first step
            random.Random(turn).shuffle(order)  # alike on all ranks
            for k, model in order:
                model.zero_grad()
                dist.barrier(groups["hsgd"])
                begin = time.perf_counter()
                model().backward()
                if turn >= 0:
                    seconds[k, turn] = time.perf_counter() - begin
        found["failures"] += _wrong(name, steps, size, groups["hsgd"])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found["seconds"][name] = dict(zip(steps, seconds.tolist(), strict=True))
        if rank == 0:  # model by model, for what an interrupted run has
            Path(f"{out}.new").write_text(json.dumps(found))
            Path(f"{out}.new").replace(out)
    dist.destroy_process_group()


def _wrong(name: str, steps: dict[str, Any], size: int, group: Any) -> list[str]:
    """Candidates whose gradients are not the average, or differ between ranks."""
    lines = []
    for candidate in ("hsgd", "gloo"):
        for weight, own in zip(
            steps[candidate].module.weights, steps[candidate].module.gradients, strict=True
        ):
            everybody = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(everybody, own, group=group)
            results = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(results, weight.grad.contiguous(), group=group)
            mean = torch.stack(everybody).mean(0)
            same = all(torch.equal(result, results[0]) for result in results)
            if not same or not torch.allclose(results[0], mean, rtol=1e-5, atol=1e-6):
                lines.append(f"{name}: wrong gradients over {candidate}")
                break
    return lines


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """vs_peer/MODEL: exposed communication over gloo to that over hsgd, where neither hides in the
    noise; vs_peer_step/MODEL: of whole steps; vs_limit_step/MODEL: steps over "nothing" to those
    over hsgd.
    """
    found = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        here = {row["candidate"]: row for row in rows if row["model"] == model}
        limit = here["nothing"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_limit_step/{model}"] = float(f"{limit:.4g}")
        ours, theirs = (here[name].get("exposed_us", 0.0) for name in ("hsgd", "gloo"))
        if ours > 0 and theirs > 0:
            found[f"vs_peer/{model}"] = float(f"{theirs / ours:.4g}")
        step = here["gloo"]["median_us"] / here["hsgd"]["median_us"]
        found[f"vs_peer_step/{model}"] = float(f"{step:.4g}")
    return found


def measure(models: list[str], size: int, rounds: int) -> tuple[dict[str, Any], Stopped]:
    """Run the ranks, until they end or somebody ends the run. Raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        args = (size, str(Path(folder, "store")), models, rounds, str(out))
        with keeping() as stopped:
            ranks = torch.multiprocessing.spawn(_worker, args, nprocs=size, join=False)
            try:
                while not ranks.join():
                    pass
            finally:
                for process in ranks.processes:
                    process.kill()
                    process.join()
        if not out.exists():
            return {"seconds": {}, "failures": []}, stopped
        return dict(json.loads(out.read_text())), stopped


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
    add("--rounds", type=int, help="steps of each candidate (default 60)")
    options = parser.parse_args(argv)
    report.check_targets(parser, options.json, options.png)
    rounds = options.rounds or (15 if options.quick else 60)
    if rounds < 1 or options.np < 1:
        parser.error("--rounds and --np: 1 or more")
    found, stopped = measure(options.models, options.np, rounds)
    rows = []
    for model, by_candidate in found["seconds"].items():
        figures = {name: report.statistics(values) for name, values in by_candidate.items()}
        for name, values in figures.items():
            row = {"model": model, "np": options.np, "candidate": name, "kind": CANDIDATES[name]}
            row |= values
            if name != "nothing":
                row["exposed_us"] = values["median_us"] - figures["nothing"]["median_us"]
            rows.append(row)
    document = {
        "meta": {
            **report.facts("ddp"),
            "settings": {"rounds": rounds, "np": options.np},
            "interrupted": bool(stopped.code),
        },
        "ratios": ratios(rows),
        "failures": found["failures"],
        "results": rows,
    }
    _show(document)
    if options.json:
        report.write_json(options.json, document)
    if options.png and rows:
        heights = {"ms per step": lambda row: row["median_us"] / 1e3}
        report.plot_bars(rows, options.png, heights, by=("model", "np"))
    return stopped.code or int(bool(found["failures"]))


def _show(document: dict[str, Any]) -> None:
    lines = []
    for model in dict.fromkeys(row["model"] for row in document["results"]):
        here = {r["candidate"]: r for r in document["results"] if r["model"] == model}
        steps = [f"{here[name]['median_us'] / 1e3:.2f}" for name in CANDIDATES]
        exposed = [f"{here[name]['exposed_us'] / 1e3:.2f}" for name in ("hsgd", "gloo")]
        ahead = document["ratios"].get(f"vs_peer/{model}")
        lines.append([model, *steps, *exposed, "-" if ahead is None else f"{ahead:.2f}"])
    header = ["model", *CANDIDATES, "exposed hsgd", "exposed gloo", "ahead"]
    print("one step, median milliseconds")
    print(report.table(header, lines))
    for line in document["failures"]:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
