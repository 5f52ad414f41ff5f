"""What the trigger of gossip costs a step: the change of all weights, and of a sample of them.

One process and one thread. After each step one of the triggers measures, in turns, so that each
finds the caches as a step leaves them, and not as the other does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from harness import report
from hsgd.optim import RelativeChange
from hsgd.optim.flat_vectors import Flattened

__all__ = ["measure", "ratios"]

WIDTHS = (64, 1024, 4096)  # of two hidden layers
BATCH = 16


def measure(widths: Sequence[int] = WIDTHS, steps: int = 80) -> Iterator[list[dict[str, Any]]]:
    """Rows of results, medians in microseconds, of `steps` steps: those of each width."""
    for width in widths:
        rows = []
        net = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        layers = list(Flattened(net.parameters()).views.values())
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        triggers = {
            "a tenth": RelativeChange(1e9),
            "all": RelativeChange(1e9, sample=1.0),
        }
        for trigger in triggers.values():
            trigger.reset(layers)
        x, y = torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))
        spent: dict[str, list[float]] = {name: [] for name in ("step", *triggers)}
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            sgd.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            sgd.step()
            spent["step"].append(time.perf_counter() - begin)
            name = list(triggers)[step % len(triggers)]
            begin = time.perf_counter()
            triggers[name].step(step, layers, 0.01)
            spent[name].append(time.perf_counter() - begin)
        case = f"{sum(layer.numel() for layer in layers)} weights, batch {BATCH}"
        for name, seconds in spent.items():
            median_us = 1e6 * statistics.median(seconds[3:])
            rows.append({"case": case, "candidate": name, "median_us": round(median_us, 2)})
        yield rows


def ratios(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Flat figures: a twentieth of a step, which is the goal, over the time of the trigger."""
    found = {}
    for (case,), here in report.grouped(results, "case").items():
        rows = {row["candidate"]: row["median_us"] for row in here}
        step = rows.pop("step")
        for name, median_us in rows.items():
            found[f"vs_limit/trigger/{name}/{case}"] = float(f"{step / 20 / median_us:.4g}")
    return found
