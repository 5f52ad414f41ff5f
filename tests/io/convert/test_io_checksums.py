"""Checksums: damage is found while reading and by `hsgd data verify`, and is never delivered."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.convert import slab_folder_writer as writing
from hsgd.io.convert.find_damage import find_damage

from hdf5_samples import arrays_of, collect, make_slabs, rewrite_attribute, write_hdf5
from hsgd.errors import DataError
from hsgd.tools import cli
from loaders import loader_of
from toolkit.range_server import RangeServer

torch = pytest.importorskip("torch")

TINY = {"block_bytes": 200, "window_bytes": 900}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """101 samples in 7 slabs, with a checksum for each 4 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "CHECKSUM_BYTES", 4 * (8 + 24 + 5 + 1))
        return make_slabs(tmp_path_factory.mktemp("checksums") / "data", 101, 7)


@pytest.fixture
def folder(original, tmp_path):
    """A copy that the test may spoil."""
    return shutil.copytree(original, tmp_path / "data")


def flip(data, field, slab, byte):
    """Change one byte of a field, behind everybody's back; the size and time stay."""
    extent = data.slabs[slab].extents[field]
    with open(data.slabs[slab].path, "r+b") as file:
        file.seek(extent.offset + byte)
        (old,) = file.read(1)
        file.seek(extent.offset + byte)
        file.write(bytes([old ^ 4]))


@pytest.mark.parametrize("dtype", [np.complex64, np.longdouble])
def test_what_h5py_reads_is_checked_too(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(writing, "CHECKSUM_BYTES", 100)
    np.savez(tmp_path / "a.npz", x=np.arange(40).astype(dtype), number=np.arange(40))
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=3)
    data = open_map(tmp_path / "out")
    assert "form of its own" in data.refusals()["x"]
    assert list(find_damage(data)) == []
    loader = loader_of(tmp_path / "out", 8, as_numpy=True, verify=True, **TINY)
    found = collect(loader)
    np.testing.assert_array_equal(found["x"], found["number"].astype(dtype))
    with h5py.File(tmp_path / "out/slab-00001.h5") as file:
        offset = file["x"].id.get_offset()
    with open(tmp_path / "out/slab-00001.h5", "r+b") as file:
        file.seek(offset)
        file.write(b"\1\2")
    (line,) = list(find_damage(open_map(tmp_path / "out")))
    assert "slab-00001.h5: the checksum of the block at row 0 of 'x' is wrong" in line
    with pytest.raises(DataError, match=r"slab-00001\.h5: the checksum of the block at row 0"):
        list(loader_of(tmp_path / "out", 8, as_numpy=True, verify=True, **TINY))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("shuffle", ["none", "block"])
@pytest.mark.parametrize("direct", [False, True])
def test_checked_reading_gives_the_same_batches(folder, world_size, shuffle, direct):
    for rank in range(world_size):
        found, expected = (
            collect(
                loader_of(
                    folder, 5, rank, world_size, shuffle, verify=verify, direct=direct, **TINY
                )
            )
            for verify in (True, False)
        )
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("field", ["number", "image", "pixels", "even"])
def test_a_flipped_bit_is_an_error_and_no_batch_with_it_is_delivered(folder, field):
    data = open_map(folder)
    row_bytes = next(spec.row_bytes for spec in data.fields if spec.name == field)
    flip(data, field, 3, 9 * row_bytes)
    first = data.slabs[3].start
    loader = loader_of(folder, 1, shuffle="none", verify=True, **TINY)
    delivered = []
    with pytest.raises(DataError, match=r"slab-00003\.h5: the checksum of the block at byte \d+"):
        delivered.extend(loader)
    assert len(delivered) == first + 8  # up to the block of four samples
    found = collect(delivered)
    for name, values in found.items():
        np.testing.assert_array_equal(values, arrays_of(101)[name][found["number"]])


def test_verify_names_every_damaged_block_and_no_other(folder):
    data = open_map(folder)
    assert list(find_damage(data)) == []
    flip(data, "image", 1, 0)
    flip(data, "number", 5, 8 * 4 + 3)
    found = list(find_damage(open_map(folder), threads=2))
    first = data.slabs[1].extents["image"].offset
    second = data.slabs[5].extents["number"].offset
    assert found == [
        f"{folder}/slab-00001.h5: bytes [{first}, {first + 96}) of 'image': wrong checksum",
        f"{folder}/slab-00005.h5: bytes [{second + 32}, {second + 64}) of 'number': wrong checksum",
    ]


def test_the_command_tells_damage_in_its_exit_code(folder, capsys):
    assert cli.main(["data", "verify", str(folder), "--quiet"]) == 0
    assert "all checksums right" in capsys.readouterr().out
    flip(open_map(folder), "image", 1, 0)
    assert cli.main(["data", "verify", str(folder), "--quiet"]) == 1
    assert "1 damaged block; restore these files" in capsys.readouterr().out


def lose_checksums(path):
    with h5py.File(path, "r+") as file:
        del file["image"].attrs["crc32c"]


def claim_another_shape(path):
    with h5py.File(path, "r+") as file:
        values, attributes = file["image"][:], dict(file["image"].attrs)
        del file["image"]
        file["image"] = values.reshape(len(values), -1)
        file["image"].attrs.update(attributes)


def spoil_the_header(path):
    with open(path, "r+b") as file:
        file.write(bytes(512))


def flip_last_byte_of_data(path):
    with h5py.File(path) as file:
        end = file["x"].id.get_offset() + file["x"].id.get_storage_size()
    with open(path, "r+b") as file:
        file.seek(end - 1)
        old = file.read(1)[0]
        file.seek(end - 1)
        file.write(bytes([old ^ 4]))


SPOILED = {
    "attribute": (lose_checksums, "damaged: "),
    "shape": (claim_another_shape, "fields differ from those of most slabs"),
    "header": (spoil_the_header, "not an HDF5 file"),
    "file": (lambda path: path.unlink(), "slab {} of 7 is missing"),
}


@pytest.mark.parametrize("number", [0, 2, 6])
@pytest.mark.parametrize("what", SPOILED)
def test_verify_reports_slabs_that_cannot_be_opened_and_checks_the_others(
    folder, capsys, what, number
):
    flip(open_map(folder), "number", 4, 0)
    spoil, why = SPOILED[what]
    spoil(folder / f"slab-{number:05d}.h5")
    assert cli.main(["data", "verify", str(folder), "--json", "--quiet"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["slabs"] == 7 and len(found["damaged"]) == 2, found
    refused, block = found["damaged"]
    assert f"slab-{number:05d}.h5: {why.format(number)}" in refused
    assert "slab-00004.h5: bytes [" in block
    assert cli.main(["data", "verify", str(folder), "--quiet"]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines == found["damaged"] and "1 damaged slab and 1 damaged block; res" in summary


@pytest.mark.parametrize("place", ["out", "out/index.h5"])
def test_rows_behind_a_lost_slab_are_those_of_their_own_slab(tmp_path, capsys, place):
    np.savez(tmp_path / "a.npz", x=np.arange(40).astype(np.complex64))
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=4)
    flip_last_byte_of_data(tmp_path / "out/slab-00003.h5")
    spoil_the_header(tmp_path / "out/slab-00001.h5")
    assert cli.main(["data", "verify", str(tmp_path / place), "--json", "--quiet"]) == 1
    first, second = json.loads(capsys.readouterr().out)["damaged"]
    assert "slab-00001.h5: not an HDF5 file" in first
    assert "slab-00003.h5: the checksum of the block at row 0 of 'x' is wrong" in second


def test_behind_a_url_the_first_slab_that_cannot_be_opened_is_an_error(folder, capsys):
    """A server that fails for a while is no damage."""
    spoil_the_header(folder / "slab-00001.h5")
    with RangeServer(folder) as server:
        assert cli.main(["data", "verify", server.url, "--json", "--quiet"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "slab-00001.h5: not an HDF5 file" in told.err


def test_verify_reports_all_slabs_where_none_can_be_opened(folder, capsys):
    for path in folder.glob("slab-*.h5"):
        spoil_the_header(path)
    assert cli.main(["data", "verify", str(folder), "--json", "--quiet"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["slabs"], found["bytes"], len(found["damaged"])) == (7, 0, 7)


def test_verify_reports_a_slab_that_changed_meanwhile_and_goes_on(folder):
    data = open_map(folder)
    (folder / "slab-00002.h5").touch()
    flip(data, "number", 4, 0)
    lines = list(find_damage(data))
    assert "slab-00002.h5: changed since it was opened" in lines[0]
    assert len(lines) == 2 or "slab-00004.h5: changed" in lines[1]


def test_what_cannot_be_checked_is_refused(folder, tmp_path):
    path = write_hdf5(tmp_path / "a.h5", {"x": np.arange(10)})
    with pytest.raises(ValueError, match="has no checksums; convert it"):
        loader_of(path, 2, verify=True)
    with pytest.raises(ValueError, match="has no checksums; convert it"):
        list(find_damage(open_map(path)))
    with pytest.raises(ValueError, match='verify=True with shuffle="full"'):
        loader_of(folder, 2, shuffle="full", verify=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checksum_rows", np.int64(5)),
        ("checksum_rows", np.int64(0)),
        ("checksum_rows", np.int64(-1)),
        ("num_samples", np.int64(7)),
        ("num_slabs", np.int64(10**6)),
        ("global_start", np.int64(3)),
        ("dataset_uuid", np.bytes_(b"")),
        ("source_digest", np.int64(1)),
        ("slab_index", np.bytes_(b"first")),
        ("sealed", np.zeros(3)),
    ],
)
@pytest.mark.parametrize("file", ["slab-00002.h5", "index.h5"])
def test_wrong_attributes_are_refused_or_harmless(folder, original, file, name, value):
    rewrite_attribute(folder / file, name, value)
    expected = collect(loader_of(original, 8))
    message = ""
    try:
        found = collect(loader_of(folder, 8, verify=True))
    except (DataError, ValueError) as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    for field, values in expected.items() if not message else ():
        np.testing.assert_array_equal(found[field], values)
