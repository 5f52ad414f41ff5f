"""Ragged fields in compressed slabs: their values lie in chunks, which samples may cross."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.convert import slab_folder_writer as writer
from hsgd.io.convert.find_damage import find_damage

from hdf5_samples import make_ragged_slabs, tokens_of
from hsgd.errors import DataError
from loaders import loader_of

hdf5plugin = pytest.importorskip("hdf5plugin")

TINY = {"block_bytes": 300, "window_bytes": 900, "as_numpy": True}


@pytest.fixture(scope="module", params=["gzip", "zstd"])
def original(request, tmp_path_factory):
    """101 samples in 7 slabs; a sample has up to 22 elements, a chunk 12, a checksum 4 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "CHECKSUM_BYTES", 200)
        folder = tmp_path_factory.mktemp("ragged") / "data"
        return make_ragged_slabs(folder, 101, 7, compress=request.param)


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


def check(batch):
    """Every sample of a batch is whole and belongs to its number."""
    numbers = batch["number"].tolist()
    for number, found in zip(numbers, batch["tokens"], strict=True):
        np.testing.assert_array_equal(found, tokens_of(number))
    return numbers


def test_chunks_hold_elements_and_are_read_around_hdf5(original):
    data = open_map(original)
    assert data.read_by()["tokens"] in ("preadv + gzip", "preadv + blosc")
    extents = [slab.extents["tokens"] for slab in data.slabs]
    assert [extent.chunks.rows for extent in extents] == [12] * 7
    assert all(extent.offsets.longest > 12 for extent in extents)  # samples cross chunks


@pytest.mark.parametrize("batch_size", [1, 8, 200])
@pytest.mark.parametrize(
    ("shuffle", "options"),
    [
        ("none", {}),
        ("block", {}),
        ("full", {}),
        ("none", {"verify": True}),
        ("block", {"verify": True}),
        ("block", {"threads": 1, "direct": True}),
    ],
)
def test_every_sample_comes_once_and_whole(original, shuffle, options, batch_size):
    seen = []
    for rank in range(3):
        loader = loader_of(original, batch_size, rank, 3, shuffle, pad=False, **TINY, **options)
        for batch in loader:
            seen += check(batch)
        assert loader.metrics()["h5py_calls"] == 0
    assert sorted(seen) == list(range(101))


def test_compressed_slabs_can_be_converted_anew(original, tmp_path):
    convert_to_slabs(original, tmp_path / "plain", num_slabs=3, seed=9)
    assert open_map(tmp_path / "plain").read_by()["tokens"] == "preadv"
    seen = [number for batch in loader_of(tmp_path / "plain", 9) for number in check(batch)]
    assert sorted(seen) == list(range(101))


def test_vectors_of_different_numbers_cross_chunks_too(tmp_path, monkeypatch):
    """Elements of 12 bytes, chunks of 4 of them."""
    import io
    import tarfile

    monkeypatch.setattr(writer, "CHECKSUM_BYTES", 200)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(30):
            data = io.BytesIO()
            np.save(data, np.full((number % 11, 3), number, np.float32))
            member = tarfile.TarInfo(f"{number:03d}.v.npy")
            member.size = len(data.getvalue())
            archive.addfile(member, io.BytesIO(data.getvalue()))
    convert_to_slabs(tmp_path / "a.tar", tmp_path / "out", num_slabs=2, compress="gzip")
    assert open_map(tmp_path / "out").slabs[0].extents["v.npy"].chunks.rows == 4
    lengths = []
    for batch in loader_of(tmp_path / "out", 7, verify=True, **TINY):
        for found in batch["v.npy"]:
            assert found.shape[1:] == (3,)
            assert len(found) == 0 or np.all(found == found[0, 0])
            assert len(found) == 0 or found[0, 0] % 11 == len(found)
            lengths.append(len(found))
    assert sorted(lengths) == sorted(number % 11 for number in range(30))


def test_damage_in_a_chunk_is_found_and_never_delivered(folder):
    position, nbytes = open_map(folder).slabs[2].extents["tokens"].chunks.place(1)
    data = bytearray((folder / "slab-00002.h5").read_bytes())
    data[position + nbytes // 2] ^= 8
    (folder / "slab-00002.h5").write_bytes(data)
    lines = list(find_damage(open_map(folder)))
    assert lines and all("slab-00002.h5: the ch" in line for line in lines)
    with pytest.raises(DataError, match=r"slab-00002\.h5: the ch"):
        list(map(check, loader_of(folder, 4, verify=True, **TINY)))
    loader = loader_of(folder, 4, verify=True, on_error="skip", **TINY)
    with pytest.warns(UserWarning, match="batches of this epoch were left out"):
        seen = [number for batch in loader for number in check(batch)]
    assert 60 < len(seen) < 101
