"""Text to learn from that nobody has to download: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def stdlib_text(count: int) -> torch.Tensor:
    """The first `count` bytes, uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:count]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
