"""PyTorch Lightning: DDP over hsgd, on slabs of HDF5, and a resume in the middle of an epoch.

    torchrun --standalone --nproc-per-node 2 examples/gallery/lightning_ddp.py

Needs pytorch-lightning. Two lines are hsgd's: the backend of the strategy, and the loader. Writes
lightning_ddp.png: a run, and one that went on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from hsgd.io import PartitionedLoader, convert_to_slabs
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Data(pl.LightningDataModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder / "digits"

    def prepare_data(self) -> None:  # one rank of each node; the others wait
        if not self.folder.exists():
            convert_to_slabs("digits", self.folder, progress=False)

    def train_dataloader(self) -> PartitionedLoader:  # finds rank and number of ranks by itself
        return PartitionedLoader(self.folder / "train", 32, seed=1, drop_last=True)


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        logits = self.layers(batch["image"])
        loss = functional.cross_entropy(logits, batch["label"])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(folder: Path, steps: int, checkpoint: Path | None = None) -> list[float]:
    pl.seed_everything(0, verbose=False)
    module = Digits()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=steps // 2, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="hsgd"),
        max_steps=steps,
        logger=False,
        callbacks=[saver],
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=Data(folder), ckpt_path=checkpoint, weights_only=False)
    return module.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of plot and data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = train(options.output, options.steps)
    half = options.steps // 2
    rest = train(options.output, options.steps, options.output / f"step={half}.ckpt")
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(whole)} steps, loss {whole[0]:.3f} to {whole[-1]:.3f}")
        print(f"from step {half}: the same losses: {'yes' if rest == whole[half:] else 'no'}")
        plot(options.output, whole, rest)


def plot(folder: Path, whole: list[float], rest: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(whole, linewidth=3, color="0.8", label="whole run")
    axes.plot(range(len(whole) - len(rest), len(whole)), rest, label="from the checkpoint")
    axes.legend(title="loss by step")
    figure.savefig(folder / "lightning_ddp.png", dpi=120)


if __name__ == "__main__":
    main()
