"""A group of an HDF5 file in the place of the whole file."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hsgd.io import PartitionedDataset, convert_to_slabs, open_map

from hdf5_samples import collect
from loaders import loader_of

COUNTS = {"train": 60, "test": 21, "deep/er": 5, "twin": 21}
HOW = {
    "contiguous": {},
    "gzip": {"chunks": (4,), "compression": "gzip"},
    "lzf": {"chunks": (4,), "compression": "lzf"},
}


def values(group):
    return 1000 * list(COUNTS).index(group) + np.arange(COUNTS[group])


@pytest.fixture(scope="module", params=HOW)
def path(tmp_path_factory, request):
    """A file with a group for each part, and a dataset beside them."""
    path = tmp_path_factory.mktemp("groups") / "a.h5"
    with h5py.File(path, "w") as file:
        for group in COUNTS:
            for name in ("x", "more/y"):
                file.create_dataset(f"{group}/{name}", data=values(group), **HOW[request.param])
        file["trainer/z"] = np.arange(7)
        file["train/scalar"] = 3
    return path


@pytest.mark.parametrize("group", ["train", "/test/", "deep/er"])
def test_a_group_is_read_as_if_it_were_the_file(path, group):
    with pytest.warns(UserWarning, match="scalar") if group == "train" else no_warning():
        loader = loader_of(path, 4, group=group)
    found = collect(loader)
    assert list(found) == ["more/y", "x"]
    for read in found.values():
        assert sorted(read.tolist()) == values(group.strip("/")).tolist()
    assert loader.num_samples == COUNTS[group.strip("/")]


def no_warning():
    from contextlib import nullcontext

    return nullcontext()


def test_fields_are_named_as_they_are_inside_the_group(path):
    loader = loader_of(path, 4, group="train", fields=["x"])
    assert [spec.name for spec in loader.fields] == ["x"]
    assert sorted(collect(loader)["x"].tolist()) == values("train").tolist()
    dataset = PartitionedDataset(path, 4, group="test", fields=["x"])
    assert sorted(n for batch in dataset for n in batch["x"].tolist()) == values("test").tolist()
    with pytest.raises(ValueError, match=r"no field train/x; there are: more/y \(60,\), x"):
        loader_of(path, 4, group="train", fields=["train/x"])


@pytest.mark.parametrize("group", ["nothing", "tra", "train/x"])
def test_a_group_without_fields_is_refused_with_those_that_have_some(path, group):
    with pytest.raises(ValueError, match=f"no group '{group}' with fields; groups .*: deep/er"):
        loader_of(path, 4, group=group)
    with pytest.raises(TypeError, match="group=3; use the name of a group"):
        loader_of(path, 4, group=3)


def test_a_state_of_another_group_is_refused(path):
    test, twin = (loader_of(path, 4, group=group) for group in ("test", "twin"))
    with pytest.raises(ValueError, match="state is of another dataset"):
        twin.load_state_dict(test.state_dict())


def test_groups_of_a_slab_folder_are_read_too(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["left/x"], file["right/x"] = np.arange(40), np.arange(40) + 100
    convert_to_slabs(tmp_path / "a.h5", tmp_path / "out", num_slabs=3)
    (spec,) = open_map(tmp_path / "out", group="right").fields
    assert spec.name == "x"
    found = collect(loader_of(tmp_path / "out", 4, group="right", verify=True))
    assert sorted(found["x"].tolist()) == list(range(100, 140))
