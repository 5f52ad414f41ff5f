"""One rank of an elastic training that faults disturb: digits, or a small GPT over characters.

Notes in a file when it entered the training and ended each step. Ranks that are left share the
batch. studies/recovery_jobs.py harms them.

    rank.py recovery_worker TASK DATA FOLDER SEED EPOCHS

DATA: an .npz file of studies/recovery_jobs.py. Lines in FOLDER/HOST-PID.log, with times of
CLOCK_MONOTONIC: "begin PARENT TIME", "enter WORLD RANK SIZE STEP TIME", "step STEP TIME", "end
TIME". Rank 0 writes FOLDER/score.json at the end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hsgd.torch as hvd
from hsgd.jobs.environment.launcher_variables import AGENT_ROUND

__all__ = ["TASKS", "Task", "main"]

CONTEXT = 64
WIDTH, HEADS, LAYERS = 96, 4, 2
VOCABULARY = 128
COMMIT_EVERY = 10  # steps


class Block(nn.Module):
    """Causal attention and a perceptron, both normalized before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.attend(self.first(x)).chunk(3, dim=2)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.second(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Characters to logits of the next ones: (samples, CONTEXT) -> (samples, CONTEXT, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.token(text) + self.place))  # type: ignore[no-any-return]


def convolutions() -> nn.Module:
    """The network of examples/train_digits.py."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Task:
    """What is trained. batch: samples of a step, of all ranks together. score: of output and
    target, of test samples.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    score: Callable[[torch.Tensor, torch.Tensor], float]


def _percent_right(output: torch.Tensor, target: torch.Tensor) -> float:
    return 100 * float((output.argmax(1) == target).double().mean())


def _loss(output: torch.Tensor, target: torch.Tensor) -> float:
    return float(functional.cross_entropy(output.flatten(0, -2), target.flatten()))


TASKS = {
    "digits": Task(
        convolutions,
        lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4),
        96,
        _percent_right,
    ),
    "gpt": Task(Gpt, lambda model: torch.optim.AdamW(model.parameters(), 3e-3), 32, _loss),
}


class Notes:
    """The file of this rank: a line is there as soon as the call returns."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.uname().nodename}-{os.getpid()}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *words: object) -> None:
        """A line of these words and the time; local."""
        os.write(self._file, f"{' '.join(map(str, words))} {time.monotonic():.6f}\n".encode())


def rate_factor(progress: float) -> float:
    """Learning rate over its peak: a twentieth of the training to warm up, then half a cosine."""
    return min(1.0, 20 * progress + 0.01) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def train(
    state: hvd.elastic.TorchState,
    task: Task,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    epochs: int,
    notes: Notes,
) -> None:
    """From where `state` is to the end; collective."""
    notes.write("enter", os.environ.get(AGENT_ROUND, 0), hvd.rank(), hvd.size(), state.step)
    share = -(-task.batch // hvd.size())
    peaks = [group["peak_lr"] for group in state.optimizer.param_groups]
    while state.epoch < epochs:
        order = torch.tensor(list(state.sampler), dtype=torch.long)
        for number, rows in enumerate(order.split(share)):
            progress = (state.epoch + state.sampler.processed_num / len(inputs)) / epochs
            for group, peak in zip(state.optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate_factor(progress)
            output = state.model(inputs[rows])
            loss = functional.cross_entropy(output.flatten(0, -2), targets[rows].flatten())
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, len(rows))
            state.step += 1
            notes.write("step", state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


@torch.no_grad()
def judge(task: Task, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The score on test samples; local."""
    model.eval()
    return task.score(torch.cat([model(part) for part in inputs.split(256)]), targets)


def main() -> None:
    """Train, as one rank."""
    name, data, folder, seed, epochs = sys.argv[1:]
    notes = Notes(Path(folder))
    notes.write("begin", os.getppid())
    torch.set_num_threads(1)
    with np.load(data) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    torch.manual_seed(int(seed))
    task = TASKS[name]
    model = task.model()
    plain = task.optimizer(model)
    for group in plain.param_groups:
        group["peak_lr"] = group["lr"]
    hvd.init()
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(len(arrays["input"])), seed=int(seed))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    run = hvd.elastic.run(train)
    run(state, task, arrays["input"], arrays["target"], int(epochs), notes)
    notes.write("end")
    if hvd.rank() == 0:
        score = judge(task, model, arrays["test_input"], arrays["test_target"])
        Path(folder, "score.json").write_text(json.dumps({"score": score, "step": state.step}))


if __name__ == "__main__":
    main()
