"""What tests of optimizers share: pools of ranks, started once for a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ranks import Ranks

__all__: list[str] = []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the ranks: other threads sum in another order, and wait long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pools() -> Any:
    """Ranks, kept by their number."""
    pools_by_size: dict[int, Ranks] = {}
    yield lambda size: pools_by_size.setdefault(size, Ranks(size))
    for pool in pools_by_size.values():
        pool.close()
