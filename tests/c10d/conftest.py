"""What the tests of process groups share."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__: list[str] = []


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a group's store lies."""
    return str(tmp_path / "store")
