"""One process without hvd that trains examples/train_digits.py's model on whole global batches.

Usage: serial_digits.py DATA EPOCHS RANKS LR FILE. Reads what RANKS ranks would read, joins their
batches, and saves {"losses": per epoch, "weights": state_dict}. The reference of test_training.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_digits
from hsgd.io import PartitionedLoader

GLOBAL_BATCH, SEED = 96, 0  # the defaults of the example


def train(data: str, epochs: int, ranks: int, lr: float) -> dict[str, Any]:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    batch = GLOBAL_BATCH // ranks
    loaders = [
        PartitionedLoader(f"{data}/train", batch, rank, ranks, seed=SEED, drop_last=True)
        for rank in range(ranks)
    ]
    steps = epochs * len(loaders[0])
    model = train_digits.build_model()
    optimizer = train_digits.build_optimizer(model, lr)
    losses, step = [], 0
    for epoch in range(1, epochs + 1):
        loss_sum, images = 0.0, 0
        for loader in loaders:
            loader.set_epoch(epoch)
        for parts in zip(*loaders, strict=True):
            label = torch.cat([part["label"] for part in parts])
            output = model(torch.cat([part["image"] for part in parts]))
            loss = functional.cross_entropy(output, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = lr * train_digits.rate_factor(step, steps)
            optimizer.step()
            step += 1
            loss_sum += loss.item() * len(label)
            images += len(label)
        losses.append(loss_sum / images)
    return {"losses": losses, "weights": model.state_dict()}


if __name__ == "__main__":
    data, epochs, ranks, lr, target = sys.argv[1:]
    torch.save(train(data, int(epochs), int(ranks), float(lr)), target)
