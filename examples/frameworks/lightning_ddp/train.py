"""Train a small convolutional network on images drawn at random: PyTorch Lightning's DDP over gloo.

PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse
import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from record import Record

BATCH = 8
CLASSES = 10


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(64 * 8 * 8, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, CLASSES),
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class RecordSteps(pl.Callback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        self.record.step(outputs["loss"].item())


def data(steps: int) -> DataLoader:
    """Images that are brighter where their label says."""
    count = steps * BATCH * int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[:, 3 * label : 3 * label + 3] += 1
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    pl.seed_everything(1)
    record = Record(options.trace)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=options.steps,
        callbacks=[RecordSteps(record)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(), data(options.steps))
    record.end(shown=trainer.is_global_zero)


if __name__ == "__main__":
    main()
