"""What tests of `hsgd status` share: ranks of a test alone, some of which it stops or kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks

__all__: list[str] = []


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool
