"""Ranks that the tests of a kind share. Owns where the programs of other folders are found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The programs call what those of the backend of torch.distributed call.
sys.path.append(str(Path(__file__).resolve().parents[1] / "c10d"))

from device_ranks import MOST, Pool
from places import why_not_cuda, why_not_nccl

__all__: list[str] = []


@pytest.fixture(scope="session")
def cuda_ranks() -> Iterator[Pool]:
    """On the first CUDA device, which they share; the test fails where there is none."""
    reason = why_not_cuda()
    if reason:
        pytest.fail(reason, pytrace=False)
    pool = Pool("cuda")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[Pool]:
    """On CUDA devices over NCCL. The test fails where there is none, and is left out where NCCL
    refuses as many ranks.
    """
    reason = why_not_cuda()
    if reason:
        pytest.fail(reason, pytrace=False)
    if why_not_nccl(MOST):
        pytest.skip(why_not_nccl(MOST))
    pool = Pool("nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def host_ranks() -> Iterator[Pool]:
    """With tensors in host memory, on any machine."""
    pool = Pool("cpu")
    yield pool
    pool.close()
