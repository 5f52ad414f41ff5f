"""Batches delivered on a device. There is none here: torch's "meta" device takes the copies."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hsgd.io import PartitionedLoader, Ragged, ReadOptions
from torch.nn.utils.rnn import pack_sequence

from hdf5_samples import make_ragged_slabs, make_slabs

__all__: list[str] = []

COUNT = 50


class Pair(NamedTuple):
    """What a transform may return."""

    inputs: Any
    rest: Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_slabs(tmp_path_factory.mktemp("device") / "data", COUNT, 3)


def test_all_tensors_of_a_batch_are_on_the_device(folder: Path, tmp_path: Path) -> None:
    with PartitionedLoader(folder, 8, 0, 1, device="meta") as loader:
        batches = list(loader)
    assert sum(len(batch["number"]) for batch in batches) == COUNT
    assert batches[0]["image"].shape == (8, 2, 3)
    assert {each.device.type for batch in batches for each in batch.values()} == {"meta"}
    ragged = make_ragged_slabs(tmp_path / "ragged", 20, 2)
    with PartitionedLoader(ragged, 5, 0, 1, device=torch.device("meta")) as loader:
        tokens = next(iter(loader))["tokens"]
    assert isinstance(tokens, Ragged) and len(tokens) == 5
    assert tokens.values.is_meta and tokens.offsets.is_meta


@pytest.mark.parametrize("threads", [0, 2])
def test_what_a_transform_returns_is_moved_and_what_is_no_tensor_stays(
    folder: Path, threads: int
) -> None:
    def transform(batch: dict[str, Any]) -> Pair:
        assert batch["image"].device.type == "cpu"
        others = OrderedDict(even=batch["even"], n=3)
        return Pair(batch["image"], [("text", batch["number"]), others])

    read = ReadOptions(transform_threads=threads)
    with PartitionedLoader(
        folder, 8, 0, 1, transform=transform, device="meta", read=read
    ) as loader:
        batch = next(iter(loader))
    assert isinstance(batch, Pair) and batch.inputs.is_meta
    (text, number), others = batch.rest
    assert type(batch.rest) is list and type(others) is OrderedDict
    assert text == "text" and number.is_meta and others["even"].is_meta and others["n"] == 3


def test_objects_that_know_how_to_move_are_asked_to(folder: Path) -> None:
    class Own:
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    def transform(batch: dict[str, Any]) -> Any:
        packed = pack_sequence([batch["number"][:3], batch["number"][:2]])
        return {"packed": packed, "own": Own(), "sparse": batch["image"][:, 0].to_sparse()}

    with PartitionedLoader(folder, 8, 0, 1, transform=transform, device="meta") as loader:
        batch = next(iter(loader))
    assert batch["packed"].data.is_meta and batch["packed"].batch_sizes.tolist() == [2, 2, 1]
    assert batch["own"] == "moved to meta"
    assert batch["sparse"].is_meta


def test_a_batch_that_cannot_be_moved_ends_the_iteration(folder: Path) -> None:
    class Failing:
        def to(self, device: torch.device) -> None:
            raise RuntimeError("out of memory")

    with PartitionedLoader(folder, 8, 0, 1, transform=lambda _: Failing(), device="meta") as loader:
        batches = iter(loader)
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        assert not loader.state_dict()["ended"]


def test_slots_for_the_longest_samples_are_page_locked_only_when_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ragged = make_ragged_slabs(tmp_path / "ragged", 20, 2)
    assert PartitionedLoader(folder, 8, 0, 1, device="cuda")._memory.pins_rows
    loader = PartitionedLoader(ragged, 8, 0, 1, device="cuda")
    assert not loader._memory.pins_rows and loader._memory.pins_decoded
    assert PartitionedLoader(ragged, 8, 0, 1, device="cuda", fields=["number"])._memory.pins_rows


def test_progress_counts_what_the_loop_has_had(folder: Path) -> None:
    loader = pickle.loads(pickle.dumps(PartitionedLoader(folder, 8, 0, 1, device="meta")))
    with loader:
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
    with PartitionedLoader(folder, 8, 0, 1, "block", device="meta") as other:
        other.load_state_dict(state)
        assert sum(len(batch["number"]) for batch in other) == COUNT - 16


@pytest.mark.parametrize(
    ("device", "present", "message"),
    [
        ("nowhere", 0, "device='nowhere'"),
        (3.5, 0, "device=3.5"),
        ("cuda", 0, "device='cuda' needs torch with a CUDA device"),
        ("cuda:99", 1, r"device='cuda:99': this process sees 1 CUDA device\(s\)"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: Any, present: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    with pytest.raises(ValueError, match=message):
        PartitionedLoader(folder, 8, 0, 1, device=device)


def test_arrays_have_no_device(folder: Path) -> None:
    with pytest.raises(ValueError, match="leave out device="):
        PartitionedLoader(folder, 8, 0, 1, as_numpy=True, device="cpu")
