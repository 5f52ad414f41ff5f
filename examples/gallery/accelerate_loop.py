"""Hugging Face accelerate: hsgd carries the gradients and reads the data; resume is accelerate's.

    torchrun --standalone --nproc-per-node 2 examples/gallery/accelerate_loop.py

Needs accelerate. Two lines are hsgd's: the process group, and the loader. Writes
accelerate_loop.png: a run, and one that went on from its saved state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from hsgd.io import PartitionedLoader, convert_to_slabs
from torch import nn
from torch.nn import functional


def train(accelerator: Accelerator, folder: Path, steps: int, begin: int = 0) -> list[float]:
    """Losses of this rank from step `begin` on, at which the state of an earlier run was saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = PartitionedLoader(folder / "digits" / "train", 32, seed=1, drop_last=True)
    model, sgd = accelerator.prepare(model, sgd)
    accelerator.register_for_checkpointing(loader)
    place = folder / "accelerate"
    if begin:
        accelerator.load_state(place)
    losses = []
    step = begin
    while step < steps:
        for batch in loader:
            sgd.zero_grad()
            logits = model(batch["image"])
            loss = functional.cross_entropy(logits, batch["label"])
            accelerator.backward(loss)
            sgd.step()
            losses.append(loss.item())
            step += 1
            if step == steps // 2 and not begin:
                accelerator.save_state(place)
            if step == steps:
                break
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of plot and data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("hsgd")
    accelerator = Accelerator(cpu=True)  # takes the group that is there
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            folder = options.output / "digits"
            convert_to_slabs("digits", folder, overwrite=True, progress=False)
    whole = train(accelerator, options.output, options.steps)
    accelerator = Accelerator(cpu=True)
    half = options.steps // 2
    rest = train(accelerator, options.output, options.steps, begin=half)
    same = "yes" if rest == whole[half:] else "no"
    accelerator.print(f"{len(whole)} steps, loss {whole[0]:.3f} to {whole[-1]:.3f}")
    accelerator.print(f"from step {half}: the same losses: {same}")
    if accelerator.is_main_process:
        plot(options.output, whole, rest)
    torch.distributed.destroy_process_group()


def plot(folder: Path, whole: list[float], rest: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(whole, linewidth=3, color="0.8", label="whole run")
    axes.plot(range(len(whole) - len(rest), len(whole)), rest, label="from the saved state")
    axes.set(title="loss by step")
    axes.legend()
    figure.savefig(folder / "accelerate_loop.png", dpi=120)


if __name__ == "__main__":
    main()
