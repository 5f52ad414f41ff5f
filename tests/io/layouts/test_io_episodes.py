"""HDF5 files with a group for each episode, whose arrays differ in length: robomimic, minari."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hsgd.io import open_map

from hsgd.errors import DataError
from loaders import loader_of

__all__: list[str] = []

EPISODES = 40
LENGTHS = np.random.default_rng(0).integers(0, 30, EPISODES)
STORED = {
    "contiguous": {},
    "gzip": {"chunks": (4, 2), "compression": "gzip", "maxshape": (None, 2)},
    "chunks by h5py": {"chunks": (4, 1), "maxshape": (None, 2), "scaleoffset": 0},
}

pytestmark = pytest.mark.filterwarnings("ignore:.*is read as one sample")


def actions(episode):
    return np.column_stack([np.full(LENGTHS[episode], episode), np.arange(LENGTHS[episode])])


def save(path, **stored):
    with h5py.File(path, "w") as file:
        for episode in range(EPISODES):
            group = file.create_group(f"data/demo_{episode}")
            group.create_dataset("actions", data=actions(episode).astype("i4"), **stored)
            group["obs/state"] = np.full((LENGTHS[episode], 3), episode, ">f8")
            group["id"] = episode
    return path


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_episode_comes_once_whole(tmp_path, stored, ranks):
    path = save(tmp_path / "a.h5", **STORED[stored])
    assert open_map(path).note.endswith("as one sample, of any length in actions, obs/state")
    seen = []
    for rank in range(ranks):
        for batch in loader_of(path, 7, rank, ranks, pad=False, as_numpy=True):
            rows = zip(batch["actions"], batch["obs/state"], batch["id"], strict=True)
            for found, state, episode in rows:
                np.testing.assert_array_equal(found, actions(int(episode)))
                np.testing.assert_array_equal(state, np.full((LENGTHS[episode], 3), episode))
                seen.append(int(episode))
    assert sorted(seen) == list(range(EPISODES))


@pytest.mark.parametrize("stored", STORED)
def test_episodes_are_cut_into_windows(tmp_path, stored):
    path, steps = save(tmp_path / "a.h5", **STORED[stored]), 8
    whole = np.concatenate([actions(episode) for episode in range(EPISODES)])
    whole = whole[: len(whole) // steps * steps].reshape(-1, steps, 2)
    names = ["actions", "obs/state"]
    for shuffle in ("none", "full"):
        found = []
        for batch in loader_of(path, 5, pack=steps, fields=names, shuffle=shuffle, as_numpy=True):
            np.testing.assert_array_equal(batch["actions"][..., 0], batch["obs/state"][..., 0])
            begins = np.flatnonzero(np.diff(batch["actions"][..., 0].ravel()) != 0) + 1
            assert set(begins) <= set(batch["cu_seqlens"])
            found += [window.tobytes() for window in batch["actions"]]
        wanted = [window.tobytes() for window in whole.astype("i4")]
        assert (found if shuffle == "none" else sorted(found)) == (
            wanted if shuffle == "none" else sorted(wanted)
        )


def test_fields_with_other_lengths_cannot_be_cut_together(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        for episode in range(EPISODES):
            file[f"data/demo_{episode}/seen"] = np.zeros(LENGTHS[episode] + 1)  # as minari does
    with pytest.raises(ValueError, match="lengths"):
        loader_of(path, 5, pack=8, fields=["actions", "seen"])


def test_episodes_that_nobody_wrote_are_refused(tmp_path):
    path = save(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        del file["data/demo_3/actions"]
        file["data/demo_3"].create_dataset("actions", (5, 2), "i4")
    with pytest.raises(DataError, match="'actions': none of 5 rows was ever written"):
        loader_of(path, 7)
