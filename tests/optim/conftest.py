"""What tests of optimizers share: pools of ranks, started once for a module."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import Ranks

__all__: list[str] = []


@pytest.fixture(scope="module")
def pools() -> Any:
    """Ranks, kept by their number."""
    pools_by_size: dict[int, Ranks] = {}
    yield lambda size: pools_by_size.setdefault(size, Ranks(size))
    for pool in pools_by_size.values():
        pool.close()
