"""Who brings decoded images to the loop: hsgd.io, its peers, and the limits.

Each candidate is a generator of one epoch: batches of uint8 tensors of SIZE x SIZE pixels of 3
values, and the numbers of the images; the limits give counts. All have two threads or two
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from images.image_files import ImageSet
from images.image_work import (
    SIZE,
    Case,
    Decode,
    by_opencv,
    by_pillow,
    by_simplejpeg,
    by_torchvision,
)
from studies.io_packages import Candidate, import_streaming

__all__ = ["BATCH", "CANDIDATES"]

BATCH = 64
THREADS = 2
_AHEAD = 4

Batches = Iterator[Any]
Read = Callable[[ImageSet, Case, int], Batches]  # images, case, epoch
_kept: dict[Any, Any] = {}  # loaders whose processes or data stay from epoch to epoch


def _decoder(case: Case) -> Any:
    from hsgd.io import images

    return images(SIZE, "random" if case == "random" else "center", flip=case == "random")


def _hsgd(images: ImageSet, case: Case, epoch: int) -> Batches:
    from hsgd.io import PartitionedLoader, ReadOptions

    key = (images.folder, case)
    if key not in _kept:
        _kept[key] = PartitionedLoader(
            images.folder / "slabs", BATCH, 0, 1, decode={"jpg": _decoder(case)},
            read=ReadOptions(decode_threads=THREADS),
        )  # fmt: skip
    _kept[key].set_epoch(epoch)
    for batch in _kept[key]:
        yield batch["jpg"], batch["cls"].reshape(-1)


def _limit(scale: bool) -> Read:
    """Threads that decode what hsgd.io decodes in this epoch, from memory, each image as far
    reduced: the sizes were looked up before. With `scale` hsgd.io's scaling follows.
    """

    def read(images: ImageSet, case: Case, epoch: int) -> Batches:
        import simplejpeg
        from hsgd.io.reading.row_copies import crop_image

        encoded, decoder = _encoded(images), _decoder(case)
        draws = decoder.draw(0, epoch, np.arange(images.count))
        wanted = [
            (data, *_wanted(decoder, simplejpeg.decode_jpeg_header(data)[:2], row))
            for data, row in zip(encoded, draws, strict=True)
        ]
        yield None  # the time begins

        def work(thread: int) -> int:
            target, scratch, done = np.empty((SIZE, SIZE, 3), np.uint8), None, 0
            for data, high, wide, part in wanted[thread::THREADS]:
                pixels = simplejpeg.decode_jpeg(data, min_height=high, min_width=wide, min_factor=2)
                if scale:
                    down, across = pixels.shape[0], pixels.shape[1]
                    place = (part[0] * across, part[1] * down, part[2] * across, part[3] * down)
                    scratch = crop_image(pixels, place, target, flip=False, scratch=scratch)
                done += 1
            return done

        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(work, range(THREADS))

    return read


def _wanted(decoder: Any, shape: tuple[int, int], draws: np.ndarray) -> tuple[Any, ...]:
    """The smallest height and width to decode to, and the part as shares of the image."""
    height, width = shape
    left, top, wide, high = decoder.part(height, width, draws)
    needed = min(1.0, SIZE / min(wide, high))
    part = (left / width, top / height, wide / width, high / height)
    return math.ceil(height * needed), math.ceil(width * needed), part


def _encoded(images: ImageSet) -> list[bytes]:
    if "encoded" not in _kept:
        _kept["encoded"] = images.encoded()
    found: list[bytes] = _kept["encoded"]
    return found


class Photos:
    """The folder of photos, as a data set of torch, Grain and SPDL."""

    def __init__(self, images: ImageSet, case: Case, decode: Decode) -> None:
        self._paths = images.paths()
        self._decoded = Decoded(case, decode)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self._decoded({"image": self._paths[number].read_bytes(), "label": number})


class Decoded:
    """A sample of bytes to pixels and its number."""

    def __init__(self, case: Case, decode: Decode) -> None:
        self._case, self._decode, self._random = case, decode, Random(0)

    def __call__(self, sample: dict[str, Any]) -> tuple[np.ndarray, int]:
        return self._decode(sample["image"], self._case, self._random), int(sample["label"])


def _collate(samples: list[tuple[np.ndarray, int]]) -> tuple[Any, Any]:
    """A batch, with one copy; the array goes on as a tensor of shared memory."""
    batch = torch.empty(len(samples), SIZE, SIZE, 3, dtype=torch.uint8)
    rows = batch.numpy()
    for row, (pixels, _) in zip(rows, samples, strict=True):
        row[:] = pixels
    return batch, torch.tensor([number for _, number in samples])


def _torch_loader(make: Callable[..., Any], data: Any, **options: Any) -> Any:
    return make(
        data, batch_size=BATCH, num_workers=THREADS, persistent_workers=True, collate_fn=_collate,
        multiprocessing_context="fork", **options,
    )  # fmt: skip


def _kept_loader(make: Callable[[ImageSet, Case], Any]) -> Read:
    """Epochs of a loader that is made once, whose processes stay."""

    def read(images: ImageSet, case: Case, epoch: int) -> Batches:
        key = (images.folder, case)
        if key not in _kept:
            _kept[key] = make(images, case)
        yield from _kept[key]

    return read


def _data_loader(decode: Decode) -> Read:
    def make(images: ImageSet, case: Case) -> Any:
        return _torch_loader(DataLoader, Photos(images, case, decode), shuffle=True)

    return _kept_loader(make)


@_kept_loader
def _webdataset(images: ImageSet, case: Case) -> Any:
    import webdataset

    shards = sorted(map(str, (images.folder / "tar").glob("*.tar")))
    stream = webdataset.WebDataset(
        shards, shardshuffle=len(shards), workersplitter=webdataset.split_by_worker,
    ).shuffle(256)  # fmt: skip
    decoded = Decoded(case, by_simplejpeg)
    stream = stream.map(lambda one: decoded({"image": one["jpg"], "label": one["cls"]}))
    return _torch_loader(DataLoader, stream)


@_kept_loader
def _streaming(images: ImageSet, case: Case) -> Any:
    decoded = Decoded(case, by_simplejpeg)

    class Stream(import_streaming().StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return decoded(super().__getitem__(at))

    stream = Stream(local=str(images.folder / "mds"), shuffle=True, batch_size=BATCH)
    return _torch_loader(DataLoader, stream)


@_kept_loader
def _litdata(images: ImageSet, case: Case) -> Any:
    import litdata

    decoded = Decoded(case, by_simplejpeg)
    stream = litdata.StreamingDataset(
        str(images.folder / "litdata"), shuffle=True, transform=decoded
    )
    return _torch_loader(litdata.StreamingDataLoader, stream)


def _grain(images: ImageSet, case: Case, epoch: int) -> Batches:
    """Its threads decode."""
    import grain

    source = grain.MapDataset.source(Photos(images, case, by_simplejpeg)).seed(epoch).shuffle()
    stream = source.to_iter_dataset(grain.ReadOptions(THREADS, 4 * BATCH))
    yield from stream.batch(BATCH, drop_remainder=False, batch_fn=_collate)


def _spdl(decode: Decode) -> Read:
    """Its threads decode."""

    def read(images: ImageSet, case: Case, epoch: int) -> Batches:
        from spdl.pipeline import PipelineBuilder

        photos = Photos(images, case, decode)
        order = np.random.default_rng(epoch).permutation(len(photos)).tolist()
        stages = PipelineBuilder().add_source(order)
        stages = stages.pipe(photos.__getitem__, concurrency=THREADS)
        stages = stages.aggregate(BATCH).pipe(_collate).add_sink(_AHEAD)
        pipeline = stages.build(num_threads=THREADS + 1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return read


CANDIDATES = (
    Candidate("hsgd", "hsgd.io", "hsgd", "", "slabs", _hsgd),
    Candidate("decode", "decoding alone", "limit", "", "photos", _limit(False)),
    Candidate("decode-scale", "decoding, scaling", "limit", "", "photos", _limit(True)),
    Candidate("loader-pillow", "DataLoader, Pillow", "peer", "", "photos", _data_loader(by_pillow)),
    Candidate("loader-simplejpeg", "DataLoader, simplejpeg", "peer", "", "photos",
              _data_loader(by_simplejpeg)),
    Candidate("loader-opencv", "DataLoader, simplejpeg, OpenCV", "peer", "", "photos",
              _data_loader(by_opencv), False, packages=("opencv",)),
    Candidate("loader-torchvision", "DataLoader, torchvision", "peer", "", "photos",
              _data_loader(by_torchvision), False, packages=("torchvision",)),
    Candidate("spdl", "SPDL, simplejpeg", "peer", "", "photos", _spdl(by_simplejpeg), False,
              packages=("spdl",)),
    Candidate("spdl-opencv", "SPDL, simplejpeg, OpenCV", "peer", "", "photos", _spdl(by_opencv),
              False, packages=("spdl", "opencv")),
    Candidate("grain", "Grain, simplejpeg", "peer", "", "photos", _grain, False,
              packages=("grain",)),
    Candidate("webdataset", "WebDataset, simplejpeg", "peer", "", "tar", _webdataset, False),
    Candidate("streaming", "Streaming, simplejpeg", "peer", "", "mds", _streaming, False),
    Candidate("litdata", "LitData, simplejpeg", "peer", "", "litdata", _litdata, False),
)  # fmt: skip
