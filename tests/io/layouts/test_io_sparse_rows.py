"""Sparse matrices by rows: AnnData's, and the cells of 10x Genomics' files."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from hsgd.io import class_names, dense, open_map

from hsgd.errors import DataError
from hsgd.tools.cli import main
from loaders import loader_of

__all__: list[str] = []

CELLS, GENES = 200, 50
STORED = {
    "contiguous": {},
    "gzip": {"compression": "gzip", "chunks": (64,), "shuffle": True},
    "scale-offset": {"scaleoffset": 0, "chunks": (64,)},
}

pytestmark = pytest.mark.filterwarnings("ignore:.*no fields, so left out")


def counts():
    """A matrix of cells by genes, of which some cells and some genes are empty."""
    draw = np.random.default_rng(3)
    found = draw.integers(1, 50, (CELLS, GENES)) * (draw.random((CELLS, GENES)) < 0.1)
    found[::17], found[:, ::11] = 0, 0
    return found.astype(np.float32)


def save_matrix(group, matrix, **stored):
    rows, columns = np.nonzero(matrix)
    group.create_dataset("data", data=matrix[rows, columns], **stored)
    group.create_dataset("indices", data=columns.astype(np.int32), **stored)
    ends = np.concatenate([[0], np.cumsum((matrix != 0).sum(axis=1))])
    group.create_dataset("indptr", data=ends.astype(np.int32), **stored)


def save(path, kind="csr", **stored):
    with h5py.File(path, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        matrix = file.create_group("X")
        matrix.attrs["encoding-type"] = f"{kind}_matrix"
        matrix.attrs["shape"] = [CELLS, GENES]
        save_matrix(matrix, counts(), **stored)
        obs = file.create_group("obs")
        obs["_index"] = [f"cell {number}" for number in range(CELLS)]
        obs["number"] = np.arange(CELLS)
        obs["kind/codes"] = (np.arange(CELLS) % 3).astype(np.int8)
        obs["kind/categories"] = ["a", "b", "c"]
        file["obsm/X_pca"] = np.arange(CELLS * 2.0).reshape(CELLS, 2)
        file["var/mean"] = np.zeros(GENES)
    return path


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_come_once_as_indices_and_values(tmp_path, stored, ranks):
    path, wanted, seen = save(tmp_path / "a.h5ad", **STORED[stored]), counts(), []
    for rank in range(ranks):
        for batch in loader_of(path, 7, rank, ranks, pad=False, as_numpy=True):
            rows = zip(batch["X/indices"], batch["X/data"], batch["obs/number"], strict=True)
            for columns, values, cell in rows:
                row = np.zeros(GENES, np.float32)
                row[columns] = values
                np.testing.assert_array_equal(row, wanted[cell])
                seen.append(int(cell))
            np.testing.assert_array_equal(batch["obsm/X_pca"][:, 0], 2.0 * batch["obs/number"])
    assert sorted(seen) == list(range(CELLS))


@pytest.mark.parametrize("columns", [None, [7, 3, 49]])
@pytest.mark.parametrize("as_numpy", [True, False])
def test_rows_come_dense(tmp_path, columns, as_numpy):
    path, wanted = save(tmp_path / "a.h5ad"), counts()
    wanted = wanted if columns is None else wanted[:, columns]
    doubled = {"decode": {"X": dense(columns)}, "transform": lambda b: {**b, "X": 2 * b["X"]}}
    loader = loader_of(path, 32, as_numpy=as_numpy, **doubled)
    assert {spec.name: spec.shape for spec in loader.fields}["X"] == (len(columns or wanted[0]),)
    for batch in loader:
        assert set(batch) == {"X", "obs/number", "obs/kind/codes", "obsm/X_pca"}
        cells = np.asarray(batch["obs/number"])
        np.testing.assert_array_equal(np.asarray(batch["X"]), 2 * wanted[cells])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Sparse CSR tensor")
def test_torch_makes_sparse_tensors_of_a_batch(tmp_path):
    import torch

    wanted = counts()
    for batch in loader_of(save(tmp_path / "a.h5ad"), 32):
        indices, values = batch["X/indices"], batch["X/data"]
        size = (len(indices), GENES)
        found = torch.sparse_csr_tensor(indices.offsets, indices.values, values.values, size)
        np.testing.assert_array_equal(found.to_dense().numpy(), wanted[batch["obs/number"]])


def test_what_is_left_out_is_named(tmp_path, capsys):
    path = save(tmp_path / "a.h5ad", kind="csc")
    found = open_map(path)
    assert "tocsr()" in found.left_out["X"]
    assert found.left_out["obs/_index"] == "it holds text"
    assert found.left_out["var/mean"] == "AnnData has it beside its cells"
    assert class_names(path, "obs/kind/codes") == ["a", "b", "c"]
    assert main(["data", "info", str(path)]) == 0
    assert "no field: X (stored by columns" in capsys.readouterr().out
    assert open_map(path, ["var/mean"]).num_samples == GENES
    for name in ("X", "obs/number"):
        with pytest.raises(ValueError, match="is no sparse matrix"):
            loader_of(path, 7, decode={name: dense()})


def test_the_cells_of_10x_genomics_are_rows(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("matrix")
        save_matrix(group, counts())
        group["shape"] = np.array([GENES, CELLS], np.int32)
        group["barcodes"] = [b"AAAC"] * CELLS
        group["features/id"] = [b"ENSG"] * GENES
    names = ["matrix/indices", "matrix/data"]
    loader = loader_of(
        tmp_path / "a.h5",
        CELLS,
        shuffle="none",
        fields=names,
        decode={"matrix": dense()},
        as_numpy=True,
    )
    (batch,) = loader
    np.testing.assert_array_equal(batch["matrix"], counts())


def test_values_of_one_place_are_added_and_columns_outside_are_refused(tmp_path):
    path = save(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        file["X/indices"][:] = 4
    options = {"decode": {"X": dense()}, "shuffle": "none", "as_numpy": True}
    (batch,) = loader_of(path, CELLS, **options)
    np.testing.assert_allclose(batch["X"][:, 4], counts().sum(axis=1))
    with h5py.File(path, "r+") as file:
        file["X/indices"][3] = GENES
    with pytest.raises(DataError, match=r"X/indices has columns 4 to 50, and the matrix 50"):
        list(loader_of(path, CELLS, **options))
    for columns in ([], [1, 1], [-1], [GENES]):
        with pytest.raises(ValueError, match="columns of 'X' are 0 to 49, each once"):
            loader_of(path, 7, decode={"X": dense(columns)})


@pytest.mark.parametrize("part", ["indptr", "data"])
@pytest.mark.parametrize("how", ["link", "source", "storage"])
def test_parts_in_other_files_make_no_matrix(tmp_path, part, how):
    """HDF5 would open them: a pipe would block, and numbers of any file could be shown."""
    path = save(tmp_path / "a.h5ad")
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(path, "r+") as file:
        rows = len(file[f"X/{part}"])
        del file[f"X/{part}"]
        if how == "link":
            file[f"X/{part}"] = h5py.ExternalLink("pipe", "/x")
        elif how == "source":
            layout = h5py.VirtualLayout((rows,), "i4")
            layout[:] = h5py.VirtualSource("pipe", "x", (rows,))
            file.create_virtual_dataset(f"X/{part}", layout)
        else:
            file["X"].create_dataset(part, (rows,), "i4", external=[("/etc/passwd", 0, 4 * rows)])
    if part == "indptr":
        assert not any(spec.ragged for spec in open_map(path, ["X/data", "X/indices"]).fields)
        return
    with pytest.raises((DataError, ValueError), match=r"no field X/data|is no file|outside of"):
        open_map(path, ["X/data", "X/indices"])


def test_matrices_of_other_columns_are_not_joined(tmp_path):
    paths = [save(tmp_path / name) for name in ("a.h5ad", "b.h5ad")]
    with h5py.File(paths[1], "r+") as file:
        file["X"].attrs["shape"] = [CELLS, GENES + 1]
    with pytest.raises(DataError, match=r"b\.h5ad: its matrices have \[51, 51\] columns"):
        open_map(paths, ["X/data", "X/indices"])


def test_a_converted_matrix_comes_dense_in_named_columns(tmp_path):
    path, out = save(tmp_path / "a.h5ad"), tmp_path / "out"
    assert (
        main(
            ["data", "convert", str(path), str(out), "--keep-order", "--fields", "X/indices,X/data"]
        )
        == 0
    )
    (batch,) = loader_of(out, CELLS, shuffle="none", decode={"X": dense([7, 3])}, as_numpy=True)
    np.testing.assert_array_equal(batch["X"], counts()[:, [7, 3]])
    with pytest.raises(ValueError, match="columns of 'X' are not known; name them"):
        loader_of(out, 7, decode={"X": dense()})


@pytest.mark.parametrize("damage", ["falls", "begins late", "ends late", "floats", "shape", "rows"])
def test_damaged_matrices_are_refused(tmp_path, damage):
    path = save(tmp_path / "a.h5ad")
    with h5py.File(path, "r+") as file:
        ends = file["X/indptr"][()]
        del file["X/indptr"]
        if damage == "falls":
            ends[5:7] = ends[6], ends[5] - 1
        elif damage == "begins late":
            ends[0] = 1
        elif damage == "ends late":
            ends[-1] += 1
        elif damage == "floats":
            ends = ends.astype(float)
        else:
            file["X"].attrs["shape"] = [CELLS] if damage == "shape" else [CELLS + 1, GENES]
        file["X/indptr"] = ends
    with pytest.raises(
        DataError, match=r"a\.h5ad: /X: .*(restore this file|has two sides|its shape 201)"
    ):
        open_map(path)
