"""Page-locked batches: a device may copy one long after the loop has dropped it.

There is no device here. A stand-in for torch's allocator of page-locked memory keeps the memory of
every block, as a device does that has not copied it yet.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hsgd.io import PartitionedLoader, Ragged, ReadOptions, argument_checks, images
from hsgd.io.batches import buffer_ring, pinned_memory
from torch import Tensor

from hdf5_samples import arrays_of, make_photo_slabs, make_ragged_slabs, make_slabs

__all__: list[str] = []

COUNT = 101


@dataclass
class Block:
    """Memory of a batch, and the storage of torch over it: its address while it lives."""

    memory: bytearray
    storage: int


Blocks = list[Block]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """All blocks that were ever had, in their order."""
    had: Blocks = []

    def new_block(nbytes: int) -> Tensor:
        memory = bytearray(nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        had.append(Block(memory, tensor.untyped_storage()._cdata))
        return tensor

    monkeypatch.setattr(buffer_ring, "new_block", new_block)
    monkeypatch.setattr(argument_checks, "check_pinning", lambda: None)
    return had


def pinned(memory_limit: int | None = None) -> ReadOptions:
    return ReadOptions(
        pin_memory=True, block_bytes=200, window_bytes=900, memory_limit=memory_limit, threads=2
    )


def tensors(batch: dict[str, Tensor | Ragged]) -> Iterator[Tensor]:
    for value in batch.values():
        yield from (value.values, value.offsets) if isinstance(value, Ragged) else (value,)


def block_of(tensor: Tensor, blocks: Blocks) -> int:
    """The number of the block of which torch knows that this tensor is a part."""
    storage = tensor.untyped_storage()._cdata
    return max(number for number, block in enumerate(blocks) if block.storage == storage)


def copy_of(block: Block, dtype: torch.dtype, start: int, shape: torch.Size) -> np.ndarray:
    """What a device copies at last."""
    whole = torch.frombuffer(block.memory, dtype=torch.uint8).view(dtype)
    return whole[start : start + shape.numel()].reshape(shape).numpy()


def test_a_dropped_batch_is_never_overwritten(tmp_path: Path, blocks: Blocks) -> None:
    folder = make_slabs(tmp_path / "data", COUNT, 3)
    queued: dict[str, list[tuple[int, torch.dtype, int, torch.Size]]] = {}
    with PartitionedLoader(folder, 4, 0, 1, "none", read=pinned()) as loader:
        for _ in range(2):
            for batch in loader:
                for name, tensor in batch.items():
                    place = tensor.dtype, tensor.storage_offset(), tensor.shape
                    queued.setdefault(name, []).append((block_of(tensor, blocks), *place))
    copied = {
        name: np.concatenate([copy_of(blocks[number], *rest) for number, *rest in each])
        for name, each in queued.items()
    }
    order = copied["number"]
    assert sorted(order) == sorted([*range(COUNT), *range(COUNT)])
    for name, whole in arrays_of(COUNT).items():
        assert np.array_equal(copied[name], whole[order]), name
    numbers = [number for number, *_ in queued["number"]]
    assert len(set(numbers)) == len(numbers) == 2 * -(-COUNT // 4)


def test_parts_of_ragged_and_decoded_batches_are_known_to_the_allocator(
    tmp_path: Path, blocks: Blocks
) -> None:
    ragged = make_ragged_slabs(tmp_path / "ragged", 40, 2)
    with PartitionedLoader(ragged, 7, 0, 1, read=pinned()) as loader:
        for batch in loader:
            assert len({block_of(tensor, blocks) for tensor in tensors(batch)}) == 1
    photos = make_photo_slabs(tmp_path / "photos", 6, 1)
    decode = {"image": images(size=16)}
    with PartitionedLoader(photos, 3, 0, 1, decode=decode, read=pinned()) as loader:
        for batch in loader:
            assert batch["image"].shape == (3, 3, 16, 16)
            for tensor in tensors(batch):
                block_of(tensor, blocks)


def test_arrays_lie_in_the_same_memory(tmp_path: Path, blocks: Blocks) -> None:
    folder = make_slabs(tmp_path / "data", COUNT, 3)
    with PartitionedLoader(folder, 8, 0, 1, "none", as_numpy=True, read=pinned()) as loader:
        kept = [batch["number"] for batch in loader]
    assert sorted(np.concatenate(kept)) == list(range(COUNT))


@pytest.mark.parametrize("views", [False, True])
def test_memory_is_limited_by_the_batches_that_the_program_keeps(
    tmp_path: Path, blocks: Blocks, views: bool
) -> None:
    folder = make_slabs(tmp_path / "data", COUNT, 3)
    read = replace(pinned(1 << 22), timeout_s=1)  # what the threads need is in it
    with PartitionedLoader(folder, 8, 0, 1, read=read) as loader:
        assert sum(len(batch["number"]) for batch in loader) == COUNT
        ring = loader._iterations._kept[0]
        assert len(blocks) <= 14 + ring.base_slots  # a new one for each batch, none for nobody
        ring._limit = ring.nbytes  # no more than there are
        assert ring.slot_bytes.bit_count() == 1  # what torch's allocator takes
        batches = itertools.chain.from_iterable(loader for _ in range(9))
        kept = ((batch["number"][1:].view(-1) if views else batch) for batch in batches)
        with pytest.raises(MemoryError, match="keeps batches"):
            list(kept)
        del batches, kept
        gc.collect()  # the error's traceback has the list
        assert sum(len(batch["number"]) for batch in loader) == COUNT


def test_fields_of_a_batch_are_apart_in_autograd(tmp_path: Path, blocks: Blocks) -> None:
    folder = make_slabs(tmp_path / "data", COUNT, 3)
    weight = torch.ones(2, 3, requires_grad=True)
    with PartitionedLoader(folder, 8, 0, 1, read=pinned()) as loader:
        batch = next(iter(loader))
        loss = (batch["image"] * weight).sum()
        batch["number"].add_(1)
        loss.backward()
    assert torch.equal(weight.grad, batch["image"].sum(0))


def test_memory_that_cannot_be_pinned_is_an_error_of_the_loop(
    tmp_path: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_slabs(tmp_path / "data", COUNT, 3)
    working, calls = buffer_ring.new_block, []

    def refused(nbytes: int) -> Tensor:
        calls.append(nbytes)
        if len(calls) in refusals:
            raise RuntimeError(f"pinning {nbytes} bytes failed: out of memory")
        return working(nbytes)

    monkeypatch.setattr(buffer_ring, "new_block", refused)
    words = r"pinning \d+ bytes failed: out of memory"
    with PartitionedLoader(folder, 8, 0, 1, read=pinned()) as loader:
        refusals = {1, 2}  # in the loop's thread, and then in a reading one
        with pytest.raises(RuntimeError, match=words):
            next(iter(loader))
        refusals = {4}  # in a reading thread
        with pytest.raises(RuntimeError, match=words):
            list(loader)
        for _ in range(3):
            assert sum(len(batch["number"]) for batch in loader) == COUNT


def test_blocks_are_in_the_memory_of_the_host_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}
    monkeypatch.setattr(torch, "empty", lambda *_, **options: asked.update(options))
    pinned_memory.new_block(10)
    assert asked["device"] == "cpu" and asked["pin_memory"] is True
