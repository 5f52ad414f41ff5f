"""A real Slurm on two virtual nodes, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.slurm import Slurm

__all__: list[str] = []


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if reason := Slurm.reason_unavailable():
        pytest.skip(reason)
    with Slurm() as slurm:
        yield slurm
