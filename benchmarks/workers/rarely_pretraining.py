"""Where texts of rarely.py begin: `python rank.py rarely_pretraining OUT SEED STEPS`.

One process trains the model for some steps, with a constant learning rate after its warm-up, and
writes weights and AdamW's state to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tasks.character_model import CharacterTask
from tasks.training_task import loss_of

__all__: list[str] = []

BATCH = 8
WARM_UP_STEPS = 50


def main() -> None:
    torch.set_num_threads(1)
    out, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    task = CharacterTask()
    net = task.model(seed)
    adamw = task.adamw(net)
    (group,) = adamw.param_groups
    rate = group["lr"]
    generator = torch.Generator().manual_seed(1000 * seed + 999)  # no rank of the training has it
    for step in range(1, steps + 1):
        group["lr"] = rate * min(1.0, step / WARM_UP_STEPS)
        adamw.zero_grad()
        symbols, following = task.batch(seed, 0, 1, BATCH, generator)
        loss_of(net(symbols), following).backward()
        adamw.step()
    part = out.with_suffix(".part")
    torch.save({"model": net.state_dict(), "adamw": adamw.state_dict()}, part)
    part.replace(out)


if __name__ == "__main__":
    main()
