"""What tests of the core share."""

from __future__ import annotations

import pytest

from ranks import meeting_point

__all__: list[str] = []


@pytest.fixture(scope="module")
def pair() -> str:
    """Where two ranks of the pool meet for all wrong calls: one communicator survives them all."""
    return meeting_point()
