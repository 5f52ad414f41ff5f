"""Train digits with DDP and with FSDP2 on the backend "hsgd": the same losses, less memory.

    torchrun --standalone --nproc-per-node 2 examples/gallery/ddp_fsdp.py

The only word that names hsgd is the backend. Both ways take the same batches and must lose alike;
FSDP2 keeps a part of the weights, gradients and momentum on each rank. Writes ddp_fsdp.png.
`--backend gloo` shows the same; one job in ten of FSDP2 over gloo aborts at its end in torch 2.13.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def train(model: nn.Module, steps: int) -> tuple[list[float], int]:
    """Losses of all ranks by step, and bytes of weights that this rank keeps. Collective."""
    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shuffled = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        batch = torch.randint(len(images), (96,), generator=shuffled)
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        sgd.zero_grad()
        loss = functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        sgd.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return losses, sum(4 * weight.numel() for weight in own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="hsgd", help="of torch.distributed (default: hsgd)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)

    model = build_model()
    ddp_losses, ddp_bytes = train(DistributedDataParallel(model), options.steps)
    model = build_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fsdp_losses, fsdp_bytes = train(fully_shard(model), options.steps)

    apart = max(abs(a - b) for a, b in zip(ddp_losses, fsdp_losses, strict=True))
    if dist.get_rank() == 0:
        for name, losses, size in (
            ("DDP", ddp_losses, ddp_bytes),
            ("FSDP2", fsdp_losses, fsdp_bytes),
        ):
            print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {size} bytes of weights here")
        print(f"{options.backend}, {dist.get_world_size()} ranks: losses apart by {apart:.1e}")
        plot(options.output, {"DDP": ddp_losses, "FSDP2": fsdp_losses})
    dist.destroy_process_group()
    if apart > 1e-3:
        raise SystemExit(f"losses of DDP and FSDP2 differ by {apart:.1e}; they should be equal")


def plot(folder: Path, losses: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(values, style, label=name)
    axes.set(title="loss by step", yscale="log")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "ddp_fsdp.png", dpi=120)


if __name__ == "__main__":
    main()
