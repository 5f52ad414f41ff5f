"""A real Slurm on two virtual nodes, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolkit.cluster import Cluster
from toolkit.slurm import Slurm

__all__: list[str] = []


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    for reason in (Cluster.reason_unavailable(), Slurm.reason_unavailable()):
        if reason:
            pytest.skip(reason)
    with Cluster(2) as cluster:
        yield Slurm(cluster)
