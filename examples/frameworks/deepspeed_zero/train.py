"""Train a small transformer on Python's own sources with DeepSpeed's ZeRO, which on CPUs asks for
gloo.

    PYTHONPATH=.. torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from record import Record
from stdlib_text import stdlib_text

BATCH = 4
LENGTH = 64
WIDTH = 256
TOKENS = 256  # bytes


class Network(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        ]
        self.embedding, self.layers = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, TOKENS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        values = self.embedding(text)
        for layer in self.layers:
            values = layer(values, src_mask=later, is_causal=True)
        return self.last(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO (default 3)")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the later steps there")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(1)
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}  # DeepSpeed's is compiled
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": adam,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
    }
    engine, *_ = deepspeed.initialize(model=Network(), config=config)
    rank, workers = dist.get_rank(), dist.get_world_size()
    pieces = stdlib_text(1 << 20).view(-1, BATCH, LENGTH).long()
    record = Record(options.trace)
    for step in range(options.steps):
        text = pieces[(step * workers + rank) % len(pieces)]
        logits = engine(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        record.step(loss.item())
    record.end(shown=rank == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
