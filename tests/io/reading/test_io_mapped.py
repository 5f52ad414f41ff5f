"""Batches that are views of the mapped files: the same as those that are read, and private."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hsgd.io.batches import mapped_batches

from hdf5_samples import arrays_of, collect, make_ragged_slabs, make_slabs, write_hdf5
from hsgd.errors import DataError
from loaders import loader_of
from toolkit.forked_child import in_forked_child

__all__: list[str] = []

MAPPED = {"shuffle": "none", "mapped": True, "as_numpy": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slabs(tmp_path_factory.mktemp("mapped") / "data", 53, 5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("how", [{}, {"drop_last": True}, {"pad": False}])
def test_mapped_batches_are_those_that_are_read(
    folder: Path, ranks: int, batch_size: int, how: dict[str, bool]
) -> None:
    batch_size = min(batch_size, 53 // ranks)
    for rank in range(ranks):
        words = (folder, batch_size, rank, ranks)
        read = list(loader_of(*words, shuffle="none", as_numpy=True, **how))
        mapped = list(loader_of(*words, **MAPPED, **how))
        assert len(mapped) == len(read)
        for ours, theirs in zip(mapped, read, strict=True):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                assert ours[name].dtype == values.dtype
                np.testing.assert_array_equal(ours[name], values)


def test_only_batches_across_slabs_are_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_batches, "_RUN_BYTES", 500)  # two batches of 3 samples
    across, numbers = [], []
    for batch in loader_of(folder, 3, **MAPPED):
        across.append(bool(batch["number"].flags.owndata))
        numbers += [batch["number"].tolist()]
    with h5py.File(folder / "index.h5") as file:
        assert [n for part in numbers for n in part] == file["number"][:].tolist()
    sizes = []
    for path in sorted(folder.glob("slab-*.h5")):
        with h5py.File(path) as file:
            sizes.append(len(file["number"]))
    assert len(sizes) == 5
    inner = np.cumsum(sizes)[:-1]
    expected = [bool(((inner > 3 * n) & (inner < 3 * n + 3)).any()) for n in range(18)]
    assert across == expected


def test_they_go_on_from_a_state_with_another_number_of_ranks(folder: Path) -> None:
    loader = loader_of(folder, 4, 0, 2, **MAPPED)
    taken = iter(loader)
    next(taken), next(taken)
    state = loader.state_dict()
    numbers = []
    for rank in range(3):
        for how in (MAPPED, {"shuffle": "none", "as_numpy": True}):
            other = loader_of(folder, 5, rank, 3, pad=False, **how)
            other.load_state_dict({**state})
            numbers.append(collect(other)["number"].tolist())
    assert numbers[0::2] == numbers[1::2]


def test_they_need_no_thread_and_outlive_the_loader(folder: Path) -> None:
    loader = loader_of(folder, 7, **MAPPED)
    batches = list(loader)
    assert [thread for thread in threading.enumerate() if thread.name == "hsgd-io"] == []
    metrics = loader.metrics()
    assert metrics["batches"] == 8
    assert metrics["bytes_read"] == sum(v.nbytes for b in batches for v in b.values())
    assert metrics["buffer_bytes"] == 0
    assert set(metrics["bypass"].values()) == {"mmap"}
    loader.close()
    del loader
    np.testing.assert_array_equal(
        np.sort(np.concatenate([batch["number"] for batch in batches])), np.arange(53)
    )


def test_what_is_written_to_a_batch_stays_there(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", arrays_of(9))
    before = path.read_bytes()
    loader = loader_of(path, 5, 1, 2, **MAPPED)  # its last sample is the first of the dataset
    first = next(iter(loader_of(path, 5, 0, 2, **MAPPED)))
    for _ in range(2):
        (batch,) = loader
        assert batch["number"].tolist() == [5, 6, 7, 8, 0]
        batch["number"] += 100
        batch["pixels"][:] = 0
    assert first["number"].tolist() == [0, 1, 2, 3, 4]
    assert path.read_bytes() == before


def test_pages_that_were_written_go_with_their_batches(tmp_path: Path) -> None:
    """64 MiB that a program changes take no more memory than a few batches."""
    rows = {"pixels": np.ones((1024, 64 << 10), np.uint8)}
    path = write_hdf5(tmp_path / "a.h5", rows)

    def private_kb() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before, most = private_kb(), 0
    for batch in loader_of(path, 16, **MAPPED):
        batch["pixels"] += 1
        most = max(most, private_kb() - before)
    assert most < 24 << 10


def test_a_repeated_sample_is_as_in_the_file(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"number": np.arange(3)})
    loader = loader_of(path, 2, 1, 2, **MAPPED)
    state = {**loader.state_dict()}
    batches = loader_of(path, 1, 1, 2, **MAPPED)
    batches.load_state_dict(state)
    seen = []
    for batch in batches:
        seen += batch["number"].tolist()
        batch["number"] += 100
    assert seen == [2, 0]


@pytest.mark.parametrize(("on_error", "delivered"), [("raise", 0), ("skip", 1)])
def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path, on_error: str, delivered: int) -> None:
    folder = make_slabs(tmp_path / "data", 20, 2)
    loader = loader_of(folder, 10, on_error=on_error, **MAPPED)
    os.truncate(folder / "slab-00001.h5", 4096)
    batches = iter(loader)
    assert len(next(batches)["number"]) == 10
    if on_error == "raise":
        with pytest.raises(DataError, match=r"slab-00001\.h5: truncated since it was opened"):
            next(batches)
    else:
        with pytest.warns(UserWarning, match="1 of 2 batches of this epoch were left out"):
            assert list(batches) == []
    assert loader.metrics()["batches"] == 1
    assert loader.metrics()["skipped"] == delivered


def test_tensors_can_be_written(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(loader_of(folder, 7, shuffle="none", mapped=True)))
    assert isinstance(batch["image"], torch.Tensor)
    assert batch["image"].mul_(0).sum() == 0


def test_a_forked_child_maps_for_itself(folder: Path) -> None:
    loader = loader_of(folder, 7, **MAPPED)
    taken = iter(loader)
    expected = next(taken)["number"].tolist()
    numbers = in_forked_child(lambda: collect(loader)["number"].tolist())
    assert numbers[:7] == expected
    assert numbers[7:14] == next(taken)["number"].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "block"}, "shuffle='block' needs copies; use \"none\""),
        ({"on_error": "substitute"}, 'on_error="substitute" needs copies'),
        ({"verify": True}, "verify, direct, pin_memory and memory_limit"),
        ({"direct": True}, "verify, direct, pin_memory and memory_limit"),
        ({"pin_memory": True}, "verify, direct, pin_memory and memory_limit"),
        ({"memory_limit": 1 << 20}, "verify, direct, pin_memory and memory_limit"),
        ({"cache_bytes": 1 << 20}, "pack=, decode= and cache= make copies"),
    ],
)
def test_what_needs_copies_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="mapped=True: ") as caught:
        loader_of(folder, 7, **{**MAPPED, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["chunks", "byte order", "ragged", "odd"])
def test_files_that_cannot_be_views_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.h5"
    if kind == "chunks":
        write_hdf5(path, arrays_of(8), chunks=True)
    elif kind == "byte order":
        write_hdf5(path, {"number": np.arange(8, dtype=">i4")})
    elif kind == "ragged":
        path = make_ragged_slabs(tmp_path / "data", 8, 2)
    else:
        write_hdf5(path, {"bytes": np.arange(7, dtype=np.uint8), "number": np.arange(7)})
        with h5py.File(path) as file:
            offsets = [file[name].id.get_offset() % 8 for name in ("bytes", "number")]
        assert offsets == [0, 7]
    message = {
        "chunks": "samples of different lengths, or chunks",
        "byte order": "of another byte order",
        "ragged": "samples of different lengths, or chunks",
        "odd": "begins at an odd address",
    }[kind]
    with pytest.raises(ValueError, match=f"mapped=True: field .*{message}"):
        loader_of(path, 2, **MAPPED)
