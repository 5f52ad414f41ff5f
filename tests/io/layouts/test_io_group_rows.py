"""HDF5 files with a group for each sample, read without conversion."""

from __future__ import annotations

import pickle
import warnings

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hdf5_samples import OTHER_FORMS, collect
from hsgd import Comm
from hsgd.errors import DataError
from loaders import loader_of
from ranks import meeting_point
from toolkit.range_server import RangeServer

__all__: list[str] = []

COUNT = 40
APART = "h5py: its arrays are not all contiguous, or all one chunk with the same filters"
# How arrays are stored -> how the reader reads them.
STORED = {
    "contiguous": ({}, "preadv"),
    "one chunk": ({"chunks": (4, 6)}, "preadv + no filter"),
    "gzip": ({"chunks": (4, 6), "compression": "gzip", "shuffle": True}, "preadv + shuffle + gzip"),
    "two chunks": ({"chunks": (2, 6)}, APART),
    "lzf": ({"chunks": (4, 6), "compression": "lzf"}, "preadv + lzf"),
    "scale-offset": ({"chunks": (4, 6), "scaleoffset": 0}, "h5py: filters (6,)"),
    "big-endian": ({"dtype": ">i4"}, "preadv"),
    "complex": ({"dtype": "c8"}, "h5py: complex64 is stored in a form of its own"),
    "float16": ({"dtype": "f2"}, "preadv"),
    "bool": ({"dtype": "?"}, "preadv"),
}


def pixels(number, dtype=np.uint8):
    return (np.arange(24).reshape(4, 6) + number).astype(dtype)


def save(path, count=COUNT, home="", **stored):
    dtype = stored.pop("dtype", np.uint8)
    with h5py.File(path, "w") as file:
        for number in range(count):
            group = file.create_group(f"{home}{number}")
            group.create_dataset("image", data=pixels(number, dtype), **stored)
            group["obs/label"] = np.int64(number)
    return path


def check_samples(path, dtype=np.uint8, **options):
    """Every sample comes once, and is right."""
    for ranks in (1, 3):
        seen = []
        for rank in range(ranks):
            loader = loader_of(path, 7, rank, ranks, pad=False, as_numpy=True, **options)
            for batch in loader:
                for image, label in zip(batch["image"], batch["obs/label"], strict=True):
                    np.testing.assert_array_equal(image, pixels(int(label), dtype))
                    seen.append(int(label))
        assert sorted(seen) == list(range(COUNT))
        if options["shuffle"] == "none" and ranks == 1:
            assert seen == list(range(COUNT))


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
@pytest.mark.parametrize("shuffle", ["none", "block", "full"])
@pytest.mark.parametrize("stored", STORED)
def test_samples_are_those_of_the_groups(tmp_path, stored, shuffle):
    options, read_by = STORED[stored]
    path = save(tmp_path / "a.h5", **options)
    found = open_map(path)
    assert found.read_by()["image"].startswith(read_by)
    assert pickle.loads(pickle.dumps(found)) == found
    check_samples(path, options.get("dtype", np.uint8), shuffle=shuffle)


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_arrays_that_are_stored_in_several_ways_are_read_by_h5py(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        for number, options in enumerate(({"chunks": (2, 3)}, {"compression": "gzip"})):
            del file[f"{7 + number}/image"]
            file.create_dataset(f"{7 + number}/image", data=pixels(7 + number), **options)
    assert open_map(path).read_by() == {"image": APART, "obs/label": "preadv"}
    check_samples(path, shuffle="block")


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
def test_samples_behind_a_url_and_past_the_page_cache(tmp_path):
    path = save(tmp_path / "a.h5")
    with RangeServer(tmp_path) as server:
        check_samples(f"{server.url}/a.h5", shuffle="block")
    check_samples(path, shuffle="block", direct=True)
    with pytest.raises(ValueError, match=r"mapped=True: samples of .* lie apart"):
        loader_of(path, 7, shuffle="none", mapped=True)


@pytest.mark.filterwarnings("ignore:.*is read as one sample")
@pytest.mark.parametrize("stored", ["contiguous", "gzip", "two chunks", "big-endian"])
def test_samples_from_the_memory_of_the_node(tmp_path, stored):
    options, _ = STORED[stored]
    path = save(tmp_path / "a.h5", **options)
    with Comm.local(meeting_point(), 0, 1) as comm:
        loader = loader_of(path, 7, comm=comm, as_numpy=True, cache_bytes=1 << 20)
        for _ in range(2):
            found = collect(loader)
            assert sorted(found["obs/label"].tolist()) == list(range(COUNT))
            for image, label in zip(found["image"], found["obs/label"], strict=True):
                wanted = pixels(int(label), options.get("dtype", np.uint8))
                np.testing.assert_array_equal(image, wanted)


def test_the_choice_is_said_and_names_of_datasets_are_another(tmp_path):
    path = save(tmp_path / "a.h5", home="data/demo_")
    with pytest.warns(UserWarning, match="each of 40 groups, data/demo_0 to data/demo_39, is read"):
        loader_of(path, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = collect(loader_of(path, 7, fields=["image"], shuffle="none", as_numpy=True))
        assert found["image"].shape == (COUNT, 4, 6)
        found = collect(loader_of(path, 7, fields=["data/demo_3/image"], as_numpy=True))
    assert sorted(found["data/demo_3/image"].ravel()) == sorted(pixels(3).ravel())
    assert open_map(path, group="data").num_samples == COUNT


def test_groups_and_fields_that_are_left_out_are_named(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["7/obs/label"]
        file["8/caption"] = "only this one"
        file["9/soft"] = h5py.SoftLink("/1/image")
        del file["11/image"]
        file["11/image"] = h5py.SoftLink("/1/image")
        file["meta"] = np.arange(3)
        for number in range(COUNT):
            file[f"{number}/text"] = "a cat"
    found = open_map(path)
    assert found.num_samples == COUNT - 2
    assert dict(found.left_out) == {
        "text": "it holds neither numbers nor bool",
        "7": "no obs/label",
        "11": "no image",
        "meta": "no image, obs/label",
    }
    with pytest.raises(DataError, match="field 'text' has a variable-length or text type"):
        open_map(path, ["text"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader_of(path, 7)
    said = [str(warning.message) for warning in caught]
    assert "'7' (no obs/label), '11' (no image)" in said[0] and len(said) == 2


@pytest.mark.parametrize(("value", "form"), OTHER_FORMS)
def test_arrays_that_differ_are_refused_by_name(tmp_path, value, form):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["11/image"]
        file["11/image"] = value
    with pytest.raises(DataError, match="that differ in the first axis alone") as raised:
        open_map(path)
    assert f"11/image is {form}, but /0/image (4, 6) uint8" in str(raised.value)


def test_arrays_packed_in_different_ways_are_refused(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["20/image"].attrs["units"] = "K"
    assert open_map(path).packing == {}
    with h5py.File(path, "r+") as file:
        file["20/image"].attrs["scale_factor"] = 0.25
    with pytest.raises(DataError, match="20/image is packed by other attributes than /0/image"):
        open_map(path)
    with h5py.File(path, "r+") as file:
        for number in range(COUNT):
            file[f"{number}/image"].attrs["scale_factor"] = 0.25
            file[f"{number}/image"].attrs["missing_value"] = [np.nan, 1.0]
    assert list(open_map(path).packing["image"]) == ["scale_factor", "missing_value"]


def test_arrays_that_nobody_wrote_are_refused(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["11/image"]
        file["11"].create_dataset("image", (4, 6), np.uint8)
    with pytest.raises(DataError, match="11/image: none of 4 rows was ever written"):
        loader_of(path, 7)


@pytest.mark.parametrize(
    ("fields", "text"), [([], "no field to read"), (["image", "/image"], "'image' is named twice")]
)
def test_no_field_and_a_field_twice_are_refused(tmp_path, fields, text):
    with pytest.raises((DataError, ValueError), match=text):
        open_map(save(tmp_path / "a.h5"), fields)


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    path = save(tmp_path / "a.h5")
    found = open_map(path).slabs[0].extents["image"]
    last = int(np.frombuffer(found.positions, np.int64).max())
    with path.open("r+b") as file:
        file.truncate(last + 10)
    with pytest.raises(DataError, match="truncated"):
        open_map(path)
