"""Train a small language model on the sources of Python: Ray Train starts two workers, whose group
is gloo's.

    PYTHONPATH=.. python train.py --workers 2 --steps 40
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch.nn import functional

from record import Record
from stdlib_text import stdlib_text

LENGTH = 16
BATCH = 256
WIDTH = 1024


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
    data = stdlib_text(1 << 20)
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
    with open(config["out"], "a") as out:
        record.end(shown=context.get_world_rank() == 0, out=out)
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
