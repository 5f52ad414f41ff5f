"""Random HDF5 files are delivered as h5py reads them, or refused by one true line."""

from __future__ import annotations

import pytest

pytest.importorskip("hdf5plugin")

from differential_campaign import run_seeds

__all__: list[str] = []


@pytest.mark.parametrize(
    ("first", "count"), [(0, 100), pytest.param(100, 1900, marks=pytest.mark.long)]
)
@pytest.mark.timeout(1200)
def test_random_files_are_read_as_by_h5py_or_refused(first: int, count: int) -> None:
    figures, findings = run_seeds(first, count)
    assert not findings, "\n\n".join(findings)
    assert min(figures["delivered"], figures["refused"]) >= count // 4
