"""Arrays of CuPy and Numba, and batches in pinned memory, on a real GPU: `make test-gpu`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import array_programs
from device_ranks import Pool

__all__: list[str] = []

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("size", [2, 3])
def test_arrays_of_cupy(cuda_ranks: Pool, size: int) -> None:
    cuda_ranks.run(array_programs.with_cupy, size)


@pytest.mark.skipif(find_spec("numba") is None, reason="Numba is not installed")
def test_arrays_of_numba(cuda_ranks: Pool) -> None:
    cuda_ranks.run(array_programs.with_numba, 2)


def test_pinned_batches_may_be_dropped_before_they_are_copied(
    cuda_ranks: Pool, tmp_path: Path
) -> None:
    cuda_ranks.run(array_programs.pinned_batches, 1, str(tmp_path))


def test_batches_are_copied_while_the_loop_computes(cuda_ranks: Pool, tmp_path: Path) -> None:
    cuda_ranks.run(array_programs.moved_batches, 1, str(tmp_path))
