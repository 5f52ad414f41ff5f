"""Steps of LARS on the shapes of real models: hsgd against torch-optimizer, timm and SGD.

Times one process, without gradients or communication.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from harness import report
from harness.peers import PeerMissing, timm_lars_file
from harness.steps import bert, resnet50
from harness.stopping import keeping
from studies import large_batch

__all__ = ["MODELS", "main"]

HYPER = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
NOTES = """\
A step updates all parameters of a model from gradients that are there. Candidates take turns, one
step each, and every one has its own parameters, gradients and momentum buffers, so that nothing is
in the caches that would not be in a training. Medians over all turns.

The limit is torch.optim.SGD(fused=True) in the same run: reading weights, gradients and buffers and
writing weights and buffers once is the least that momentum needs. LARS has to read the gradients
of large tensors once more, for their norms; all candidates have as many threads.

After the run the parameters are compared: hsgd's preset must be where its peer is.

examples:
  python benchmarks/lars.py --quick
  python benchmarks/lars.py --threads 1 2 --json lars.json --png lars.png
"""

Shapes = list[tuple[int, ...]]
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "bert": bert,
    "1000x256": lambda: [(16, 16)] * 1000,
}


def candidates(install: bool) -> tuple[dict[str, tuple[str, Make]], list[str]]:
    """Kind and maker by name, and a line for each that is missing."""
    from hsgd.optim import LAMB, LARS

    found: dict[str, tuple[str, Make]] = {
        "hsgd": ("hsgd", lambda p: LARS(p, **HYPER)),
        "hsgd timm": ("hsgd", lambda p: LARS(p, **HYPER, preset="timm")),
        "hsgd torch_optimizer": ("hsgd", lambda p: LARS(p, **HYPER, preset="torch_optimizer")),
        "hsgd LAMB": ("other", lambda p: LAMB(p, lr=0.01)),
        "SGD fused": ("limit", lambda p: torch.optim.SGD(p, **HYPER, fused=True)),
        "SGD": ("other", lambda p: torch.optim.SGD(p, **HYPER, foreach=False)),
    }
    missing = []
    try:
        import torch_optimizer

        found["torch_optimizer"] = (
            "peer",
            lambda p: torch_optimizer.LARS(p, **HYPER, trust_coefficient=0.01),
        )
    except ImportError:
        missing.append("torch_optimizer: not installed; pip install torch-optimizer")
    try:
        lars = _load(timm_lars_file(install)).Lars
        found["timm"] = ("peer", lambda p: lars(p, **HYPER))
    except PeerMissing as error:
        missing.append(f"timm: {error}")
    return found, missing


def _load(path: Path) -> Any:
    """A module of a folder whose package is not imported: timm as a whole needs torchvision."""
    package = types.ModuleType("_peer")
    package.__path__ = [str(path.parent)]
    sys.modules["_peer"] = package
    return importlib.import_module(f"_peer.{path.stem}")


def measure(
    shapes: Shapes, makers: dict[str, tuple[str, Make]], rounds: int, progress: Any
) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of each step by candidate, and where hsgd and a peer ended apart."""
    draw = torch.Generator().manual_seed(1)
    sets: dict[str, list[torch.nn.Parameter]] = {name: [] for name in makers}
    for shape in shapes:  # tensor by tensor: no candidate has better pages than another
        weight, grad = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        for parameters in sets.values():
            parameters.append(torch.nn.Parameter(weight.clone()))
            parameters[-1].grad = grad.clone()
    optimizers = {name: make(sets[name]) for name, (_, make) in makers.items()}
    for optimizer in optimizers.values():
        optimizer.step()  # makes the buffers of those that have none yet
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    gc.disable()
    names = list(makers)
    for number in range(rounds):
        random.Random(number).shuffle(names)  # nobody follows the same one in each round
        for name in names:
            begin = time.perf_counter()
            optimizers[name].step()
            seconds[name].append(time.perf_counter() - begin)
            progress.update()
    gc.enable()
    apart = []
    for peer in ("timm", "torch_optimizer"):
        for ours, theirs in zip(sets[f"hsgd {peer}"], sets.get(peer, ()), strict=False):
            here, there = ours.detach(), theirs.detach()
            error = float(torch.linalg.vector_norm(here - there) / torch.linalg.vector_norm(there))
            if not error < 1e-5:
                apart.append(f"{peer}, shape {tuple(ours.shape)}: apart by {error:.2g}")
                break
    return seconds, apart


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """vs_peer/MODEL/THREADS, vs_NAME/..., and vs_limit/..., all over hsgd's LARS."""
    found = {}
    for (model, threads), same in report.grouped(rows, "model", "threads").items():
        here = {row["candidate"]: row for row in same}
        peers = {name: row["median_us"] for name, row in here.items() if row["kind"] == "peer"}
        limit = here["SGD fused"]["median_us"]
        compared = report.versus(here["hsgd"]["median_us"], peers, limit)
        found.update({f"{vs}/{model}/{threads}threads": v for vs, v in compared.items()})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code is 1 where hsgd and a peer came to different parameters."""
    parser = report.argument_parser(
        *("Measure steps of LARS on the shapes of real models.", NOTES),
        quick="fewer models and rounds: under a minute",
        png="plot the medians there",
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, help="default: all, with --quick without bert")
    add("--threads", nargs="+", type=int, default=[1], help="of torch and the kernel (default 1)")
    add("--rounds", type=int, help="steps of each candidate (default 30)")
    add("--peers", action="store_true", help="download peers that are not there yet")
    add("--accuracy", action="store_true", help="accuracy against the batch: --accuracy --help")
    given = sys.argv[1:] if argv is None else list(argv)
    if "--accuracy" in given:
        return large_batch.main([word for word in given if word != "--accuracy"])
    options = report.parse(parser, given)
    rounds = options.rounds or (7 if options.quick else 30)
    if rounds < 1 or min(options.threads) < 1:
        parser.error("--rounds and --threads: 1 or more")
    models = options.models or [m for m in MODELS if not options.quick or m != "bert"]
    makers, missing = candidates(options.peers)
    rows, failures = [], [f"left out: {line}" for line in missing]
    wrong = False
    cases = [(model, threads) for model in models for threads in options.threads]
    steps = len(cases) * rounds * len(makers)
    with keeping() as stopped, tqdm(total=steps, unit="step", disable=None) as progress:
        for model, threads in cases:
            torch.set_num_threads(threads)
            seconds, apart = measure(MODELS[model](), makers, rounds, progress)
            wrong |= bool(apart)
            failures += [f"{model}: {line}" for line in apart]
            for name, values in seconds.items():
                row = {"model": model, "threads": threads, "candidate": name}
                row |= {"kind": makers[name][0], **report.statistics(values)}
                rows.append(row)
    settings = {"rounds": rounds, **HYPER}
    document = report.document("lars", settings, ratios(rows), rows, failures, stopped.code)
    report.publish(options, document, table(document), plot)
    return stopped.code or int(wrong)


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw the medians."""
    heights = {"ms per step": lambda row: row["median_us"] / 1e3}
    report.plot_bars(document["results"], target, heights, by=("model", "threads"))


def table(document: Mapping[str, Any]) -> str:
    """A line for each model and number of threads."""
    shares: dict[str, Any] = {}
    for title, vs in (("ahead", "vs_peer"), ("of limit", "vs_limit")):
        shares[title] = lambda row, vs=vs: document["ratios"].get(
            f"{vs}/{row['model']}/{row['threads']}threads"
        )
    return "one step, median milliseconds\n" + report.pivot(
        document["results"],
        {"model": "model", "threads": "threads"},
        "candidate",
        lambda row: f"{row['median_us'] / 1e3:.2f}",
        shares,
    )


if __name__ == "__main__":
    sys.exit(main())
