"""The same encoded images as files of every candidate: slabs, a folder, tar, MDS and LitData.

The images are parts of photos that scikit-learn and matplotlib bring along, scaled, with grain, as
JPEG of about 150 KB; image `i` is the same in every run.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from studies.io_files import write_litdata, write_mds

__all__ = ["ImageSet", "make_images"]

IMAGE_BYTES = 150_000
SIZES = ((500, 375), (375, 500), (500, 400), (640, 480))  # width and height
_GRAIN = 4.0  # standard deviation of brightness, of 255


@dataclass(frozen=True)
class ImageSet:
    """`count` images in `folder`: photos/00/000000.jpg and so on, slabs/, tar/, mds/, litdata/."""

    folder: Path
    count: int

    def paths(self) -> list[Path]:
        """The files of the images; the number of an image is its place."""
        return sorted((self.folder / "photos").rglob("*.jpg"))

    def encoded(self) -> list[bytes]:
        """All of them in memory."""
        return [path.read_bytes() for path in self.paths()]


def make_images(folder: Path, count: int, kinds: set[str]) -> ImageSet:
    """Write the files that are not there yet."""
    images = ImageSet(folder, count)
    photos = folder / "photos"
    if not photos.exists():
        sources = _sources()
        for number in range(count):
            place = photos / f"{number // 1000:02d}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:06d}.jpg").write_bytes(_image(sources, number))
    for kind, write in _WRITERS.items():
        if kind in {*kinds, "tar"} and not (folder / kind).exists():
            write(folder / kind, images)
    return images


def _sources() -> list[Any]:
    from matplotlib import cbook
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    path = str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    with Image.open(path) as opened:
        return [*photos, opened.convert("RGB")]


def _image(sources: list[Any], number: int) -> bytes:
    """A part of a photo of at least six tenths of its area, as JPEG (4:2:0) in the best quality
    that fits.
    """
    from PIL import Image

    random = np.random.default_rng(number)
    source = sources[number % len(sources)]
    width, height = SIZES[random.integers(len(SIZES))]
    wide = min(source.width, source.height * width / height) * random.uniform(0.6, 1) ** 0.5
    high = wide * height / width
    left, top = random.uniform(0, source.width - wide), random.uniform(0, source.height - high)
    box = (left, top, left + wide, top + high)
    scaled = source.resize((width, height), Image.Resampling.BICUBIC, box=box)
    grain = random.normal(0, _GRAIN, (height, width, 1))
    pixels = np.clip(np.asarray(scaled, np.float64) + grain, 0, 255).astype(np.uint8)
    fits, low, high_quality = b"", 1, 100
    while low < high_quality:
        quality = (low + high_quality + 1) // 2
        memory = BytesIO()
        Image.fromarray(pixels).save(memory, "JPEG", quality=quality)
        if memory.tell() <= IMAGE_BYTES:
            fits, low = memory.getvalue(), quality
        else:
            high_quality = quality - 1
    return fits


def _write_slabs(folder: Path, images: ImageSet) -> None:
    """As `hsgd data convert tar/ slabs/ --encoded` does: fields jpg and cls."""
    from hsgd.io import convert_to_slabs

    convert_to_slabs(images.folder / "tar", folder, encoded=True)


def _write_tar(folder: Path, images: ImageSet) -> None:
    folder.mkdir()
    encoded = images.encoded()
    for shard in range(4):  # so that two workers have the same to do
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for number in range(shard, len(encoded), 4):
                for suffix, data in (("jpg", encoded[number]), ("cls", str(number).encode())):
                    entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    entry.size = len(data)
                    archive.addfile(entry, BytesIO(data))


def _write_mds(folder: Path, images: ImageSet) -> None:
    samples = ({"image": data, "label": k} for k, data in enumerate(images.encoded()))
    write_mds(folder, {"image": "bytes", "label": "int"}, samples)


def _numbered(path: str) -> Iterator[dict[str, Any]]:
    yield {"image": Path(path).read_bytes(), "label": int(Path(path).stem)}


def _write_litdata(folder: Path, images: ImageSet) -> None:
    write_litdata(folder, _numbered, [str(path) for path in images.paths()])


_WRITERS: dict[str, Callable[[Path, ImageSet], None]] = {
    "tar": _write_tar,
    "slabs": _write_slabs,
    "mds": _write_mds,
    "litdata": _write_litdata,
}
