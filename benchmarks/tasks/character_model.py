"""A character-level language model and its text: the sources of Python's standard library.

The model is a transformer of the GPT-2 form (pre-norm, learned positions).
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CONTEXT", "CharacterModel", "CharacterTask", "Text"]

CONTEXT = 128
_SYMBOLS = 128  # other bytes become 127


class Text:
    """Training and validation text, as bytes; local. Whole files go to one of them."""

    def __init__(self, most_bytes: int = 30_000_000) -> None:
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        left = most_bytes
        for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" in file.parts or left <= 0:
                continue
            data = file.read_bytes()
            left -= len(data)
            held_out = hashlib.sha256(file.name.encode()).digest()[0] < 13  # one in twenty
            parts[held_out].append(data)
        self.train, self.held_out = (
            torch.from_numpy(np.minimum(np.frombuffer(b"".join(parts[key]), np.uint8), 127))
            for key in (False, True)
        )

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Contexts of training text and what follows each symbol: int64 (count, CONTEXT)."""
        return _windows(self.train, count, generator)

    def held_out_batches(self, number: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """The same of validation text, the same ones at each call."""
        generator = torch.Generator().manual_seed(7)
        return [_windows(self.held_out, count, generator) for _ in range(number)]


def _windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class CharacterModel(nn.Module):
    """Logits (rows, CONTEXT, symbols) of int64 (rows, CONTEXT); 1.07 million parameters as it is.

    seed: of the first weights.
    """

    def __init__(self, seed: int, width: int = 144, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.symbols = nn.Embedding(_SYMBOLS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _SYMBOLS, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = (2 * layers) ** -0.5 if name.endswith(("out.weight", "mlp.2.weight")) else 1
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class CharacterTask:
    """All ranks draw from the whole text. rate: of AdamW, from random weights; outer: learning rate
    and momentum of DiLoCo's outer steps, chosen on seed 99. As of SkewedDigits.
    """

    rate: ClassVar[float] = 2e-3
    outer: ClassVar[tuple[float, float]] = (0.7, 0.5)

    def __init__(self) -> None:
        self._text = Text()

    def model(self, seed: int) -> nn.Module:
        return CharacterModel(seed)

    def adamw(self, net: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            net.parameters(), lr=self.rate, weight_decay=0.1, betas=(0.9, 0.95)
        )

    def batch(
        self, seed: int, rank: int, size: int, count: int, draw: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return self._text.batch(count, draw)

    def held_out(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Equal parts, whose number `size` divides; the same ones at each call."""
        return self._text.held_out_batches(8 * -(-size // 8), 16)
