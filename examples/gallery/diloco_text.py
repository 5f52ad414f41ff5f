"""Train a small GPT on Python's own sources: gradients every step, or DiLoCo every tenth.

    torchrun --standalone --nproc-per-node 2 examples/gallery/diloco_text.py
    mpirun -n 2 python examples/gallery/diloco_text.py

Both ways take the same characters; DiLoCo sends a tenth of the bytes.
Writes diloco_text.png. On several nodes leave out group=None: ranks of a node are one worker then.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import hsgd.torch as hvd

CONTEXT, EVERY = 64, 10


class Gpt(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, symbols: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        inputs = self.symbols(symbols) + self.places.weight
        return self.head(self.layers(inputs, mask=mask, is_causal=True))


def read_text() -> Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def train(steps: int, **options: object) -> tuple[list[float], float]:
    """Losses by step, the mean over ranks, and bytes that this rank sent for each. Collective."""
    torch.manual_seed(0)
    model, text = Gpt(), read_text()
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(adamw, model=model, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (16, 1), generator=generator)
        batch = text[starts + torch.arange(CONTEXT + 1)].long()
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    exchanges = steps
    if options:
        optimizer.synchronize_weights()  # all ranks have the same model now
        exchanges = optimizer.metrics().outer_steps
        optimizer.close()
    return hvd.allreduce(torch.stack(losses), name="losses").tolist(), size * exchanges / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder of the plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    rare = {"strategy": "diloco", "strategy_options": {"sync_every": EVERY, "group": None}}
    runs = {"every step": train(options.steps), "DiLoCo": train(options.steps, **rare)}
    if hvd.rank() == 0:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, (losses, size) in runs.items():
            last = sum(losses[-10:]) / len(losses[-10:])
            print(f"{name}: loss {losses[0]:.3f} to {last:.3f}, {size:.0f} bytes a step averaged")
            axes.plot(losses, label=name)
        axes.set(title="loss by step")
        axes.legend()
        options.output.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.output / "diloco_text.png", dpi=120)
    hvd.shutdown()


if __name__ == "__main__":
    main()
