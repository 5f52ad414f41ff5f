"""A rank is killed in the middle of training: the others go on, and a new one joins.

    hsgd run -np 3 --min-np 2 python examples/gallery/elastic.py

The last rank kills itself at half of the steps. Writes elastic.png: the loss, and how many ranks
took part, by step.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hsgd.torch as hvd

COMMIT_EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, labels = (torch.tensor(found) for found in load_digits(return_X_y=True))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    # Until train() is called nothing is collective: a new rank comes through here alone.
    hvd.init()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        state.worlds += 1
        print(f"rank {hvd.rank()} of {hvd.size()} begins at step {state.step}", flush=True)
        while state.step < options.steps:
            failing = state.worlds == 1 and hvd.rank() == hvd.size() - 1
            if failing and state.step == options.steps // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            generator = torch.Generator().manual_seed(state.step * 1000 + hvd.rank())
            chosen = torch.randint(len(labels), (32,), generator=generator)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pixels[chosen].float() / 16), labels[chosen])
            loss.backward()
            optimizer.step()
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            state.curve = [*state.curve, (state.step, mean, hvd.size())]
            state.step += 1
            if state.worlds > 1:
                time.sleep(0.02)  # leaves the new rank time to start before the steps are over
            if state.step % COMMIT_EVERY == 0:
                state.commit()  # what later steps did is done again after a loss

    state = hvd.elastic.TorchState(model, optimizer, step=0, worlds=0, curve=[])
    train(state)
    with torch.no_grad():
        accuracy = (model(pixels.float() / 16).argmax(1) == labels).float().mean()
    if hvd.rank() == 0:
        sizes = sorted({size for _, _, size in state.curve})
        print(f"{len(state.curve)} steps, with {' and '.join(map(str, sizes))} ranks")
        print(f"accuracy {accuracy:.1%}")
        plot(options.output, state.curve)


def plot(folder: Path, curve: list[tuple[int, float, int]]) -> None:
    from matplotlib.figure import Figure

    steps, losses, sizes = zip(*curve, strict=True)
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot(steps, losses)
    upper.set(ylabel="loss")
    lower.step(steps, sizes, where="post", color="C1")
    lower.set(ylabel="ranks", xlabel="step", ylim=(0, max(sizes) + 1))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "elastic.png", dpi=120)


if __name__ == "__main__":
    main()
