"""Programs of PyTorch Lightning and accelerate, which know of hsgd that it has a loader.

Each of the ranks writes a file of JSON: the samples of each step of a run, as (epoch, numbers),
and those of runs that go on from checkpoints of it. Run by torchrun, with lightning, accelerate or
shards, the folder of the dataset, and one for checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from hsgd.io import PartitionedDataset, PartitionedLoader, ReadOptions

__all__: list[str] = []

BATCH = 5
EPOCHS = 3
TINY = ReadOptions(block_bytes=200, window_bytes=900)
Steps = list[tuple[int, list[int]]]


def loader_of(folder: str) -> PartitionedLoader:
    return PartitionedLoader(folder, BATCH, seed=3, pad=False, drop_last=True, read=TINY)


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    return [int(number) for number in batch["number"]]


def with_lightning(folder: str, place: str) -> dict[str, Steps]:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.steps: Steps = []

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            self.steps.append((self.current_epoch, numbers(batch)))
            return self.layer(batch["number"].float()[:, None]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    def run(checkpoint: str | None, *callbacks: ModelCheckpoint) -> Steps:
        module = Module()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy="ddp",
            max_epochs=EPOCHS,
            logger=False,
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader_of(folder), ckpt_path=checkpoint, weights_only=False)
        return module.steps

    every = ModelCheckpoint(place, "{step}", every_n_train_steps=1, save_top_k=-1)
    found = {"whole": run(None, every)}
    per_epoch = len(loader_of(folder))
    for step in (3, per_epoch, per_epoch + 2):
        found[f"from {step}"] = run(os.path.join(place, f"step={step}.ckpt"))
    return found


def with_accelerate(folder: str, place: str) -> dict[str, Steps]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    found: dict[str, Steps] = {"whole": []}
    loader = loader_of(folder)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(loader)
    step = 0
    for epoch in range(EPOCHS):
        for batch in prepared:
            found["whole"].append((epoch, numbers(batch)))
            accelerator.backward(model(batch["number"].float()[:, None]).mean())
            optimizer.step()
            step += 1
            accelerator.save_state(os.path.join(place, str(step)))
    for step in (3, len(loader), len(loader) + 2):
        accelerator.load_state(os.path.join(place, str(step)))
        steps: Steps = []
        for epoch in range((step - 1) // len(loader), EPOCHS):
            steps += [(epoch, numbers(batch)) for batch in prepared]
        found[f"from {step}"] = steps
    return found


def with_shards(folder: str, place: str) -> dict[str, Any]:
    """What becomes of a DataLoader that accelerate would divide again."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    found: dict[str, Any] = {}
    for dispatch in (None, False):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)
        )
        dataset = PartitionedDataset(folder, seed=3, read=TINY)
        batches = accelerator.prepare(DataLoader(dataset, batch_size=BATCH))
        try:
            found[str(dispatch)] = [numbers(batch) for batch in batches]
        except ValueError as error:
            found[str(dispatch)] = str(error)
        dataset = PartitionedDataset(folder, rank=0, world_size=1, seed=3, read=TINY)
        batches = accelerator.prepare(DataLoader(dataset, batch_size=BATCH))
        found[f"{dispatch} alone"] = [numbers(batch) for batch in batches]
    return found


PROGRAMS = {"lightning": with_lightning, "accelerate": with_accelerate, "shards": with_shards}

if __name__ == "__main__":
    what, folder, place = sys.argv[1:]
    found = PROGRAMS[what](folder, place)
    with open(os.path.join(place, f"rank-{os.environ['RANK']}.json"), "w") as file:
        json.dump(found, file)
