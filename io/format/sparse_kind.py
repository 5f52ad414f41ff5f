"""sparse_kind: finds sparse matrices: AnnData's, and the cells of 10x Genomics' files.

Group M is read as the ragged fields M/indices and M/data. Sources: AnnData's on-disk format 0.1.0
(attributes encoding-type, shape), its older form (h5sparse_format), and Cell Ranger's matrix of
features by barcodes, stored by barcodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .link_guard import hard_linked
from .slab_folder import import_h5py

if TYPE_CHECKING:
    import h5py

__all__ = ["BY_COLUMNS", "PARTS", "is_anndata", "plain_dataset", "sparse_kind", "sparse_parent"]

PARTS = ("indices", "data")
BY_COLUMNS = "stored by columns (CSC), and samples are rows; store it by rows, as tocsr() makes it"
_MATRICES = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}


def is_anndata(file: h5py.File) -> bool:
    """Return whether a file is one of AnnData."""
    return _text(file, "encoding-type") == "anndata"


def sparse_kind(group: Any) -> str:
    """Return "csr" or "csc" if a group is a sparse matrix, else ""."""
    h5py = import_h5py()

    if not isinstance(group, h5py.Group):
        return ""
    if not all(plain_dataset(group, part) for part in (*PARTS, "indptr")):
        return ""
    said = _text(group, "encoding-type") or _text(group, "h5sparse_format")
    if not said and plain_dataset(group, "shape") and "barcodes" in group:
        return "csr"  # features by barcodes, by columns: the cells are rows
    return _MATRICES.get(said, "")


def plain_dataset(group: h5py.Group, name: str) -> Any:
    """Return a dataset that lies in the file of its group, without other files; else None."""
    h5py = import_h5py()

    found = hard_linked(group, name)
    if not isinstance(found, h5py.Dataset):
        return None
    create = found.id.get_create_plist()
    is_elsewhere = create.get_layout() == h5py.h5d.VIRTUAL or create.get_external_count()
    return None if is_elsewhere else found


def sparse_parent(file: h5py.File, stored: str) -> Any:
    """Return the matrix by rows of which `stored` is the indices or the data, else None."""
    home, _, part = stored.rpartition("/")
    if part not in PARTS or not home:
        return None
    group = file.get(home)
    if sparse_kind(group) != "csr" or group.file.filename != file.filename:
        return None
    return group


def _text(item: Any, name: str) -> str:
    try:
        found = item.attrs.get(name, "")
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):  # of a type that h5py lacks
        return ""
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    return found if isinstance(found, str) else ""
