"""Train a small language model on the sources of Python: Ray Train starts two workers, whose group
is gloo's.

    python train.py --workers 2 --steps 40
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn import functional

WARM_UP = 5
LENGTH = 16
BATCH = 256
WIDTH = 1024


class Record:
    """Losses and times of the steps of this rank, and a trace of all but the first ones."""

    def __init__(self, trace: str | None) -> None:
        self.losses: list[float] = []
        self.ends = [time.perf_counter()]
        self.trace = trace
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def step(self, loss: float) -> None:
        self.losses.append(loss)
        self.ends.append(time.perf_counter())
        if self.trace and len(self.losses) == WARM_UP:
            self.profiler.start()

    def end(self, out: str | None) -> None:
        found = {"losses": self.losses, "step_s": [b - a for a, b in pairwise(self.ends)]}
        if self.trace:
            self.profiler.stop()
            if out:
                self.profiler.export_chrome_trace(self.trace)
            found["traced_steps"] = len(self.losses) - WARM_UP
        if out:
            Path(out).write_text(json.dumps(found))


def text() -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 1 << 20]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Model(torch.nn.Module):
    """Predicts the byte after LENGTH others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(256, 64),
            torch.nn.Flatten(),
            torch.nn.Linear(64 * LENGTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 256),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens)


def work(config: dict) -> None:
    """What each worker runs."""
    context = ray.train.get_context()
    torch.manual_seed(1)
    model = prepare_model(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = text()
    generator = torch.Generator().manual_seed(context.get_world_rank())
    record = Record(config["trace"])
    for _ in range(config["steps"]):
        begins = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        pieces = torch.stack([data[begin : begin + LENGTH + 1] for begin in begins]).long()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(pieces[:, :-1]), pieces[:, -1])
        loss.backward()
        optimizer.step()
        record.step(loss.item())
    record.end(config["out"] if context.get_world_rank() == 0 else None)
    ray.train.report({})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=options.workers, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "record.json")
        TorchTrainer(
            work,
            train_loop_config={"steps": options.steps, "trace": options.trace, "out": str(out)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
        print(out.read_text(), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
