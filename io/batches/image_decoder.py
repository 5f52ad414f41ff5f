"""ImageDecoder: decodes images to pixels of one size, for `decode=` of a loader.

The part of an image that is used depends only on seed, epoch and sample. It is chosen as in
torchvision's RandomResizedCrop, or Resize(256) with CenterCrop(224). simplejpeg (libjpeg-turbo)
decodes JPEG, Pillow other formats, and libhsgd_io scales; all three release the GIL.
"""

from __future__ import annotations

import io as standard_io
import math
import threading
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..format.slab_folder import FieldSpec
from ..needed_for import needed_for
from ..order.epoch_order import IntArray
from ..reading.row_copies import crop_image

__all__ = ["Crop", "ImageDecoder", "UnreadableImage", "images"]

Crop = Literal["random", "center"]

_JPEG = b"\xff\xd8"
_ATTEMPTS = 10  # to find a part of the wanted ratio inside an image
_CENTRAL = 224 / 256
_GAMMA = 0x9E3779B97F4A7C15
_MOST_PIXELS = 2 * 89_478_485  # Pillow's limit, against damaged headers
_DRAWS = 1 + 4 * _ATTEMPTS
_scratch = threading.local()


class UnreadableImage(ValueError):
    """Bytes are not an image, or a damaged one."""


@dataclass(frozen=True)
class ImageDecoder:
    """Decoder with the arguments of images()."""

    size: int
    crop: Crop = "center"
    flip: bool = False
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            known = ", ".join(map(repr, get_args(Crop)))
            raise ValueError(f"images: crop={self.crop!r}; use one of {known}")
        whole = isinstance(self.size, int) and not isinstance(self.size, bool)
        if not whole or not 1 <= self.size <= 1 << 14:
            raise ValueError(f"images: size={self.size}; use 1 to {1 << 14}")
        if not (0 < self.scale[0] <= self.scale[1] <= 1 and 0 < self.ratio[0] <= self.ratio[1]):
            raise ValueError(
                f"images: scale={self.scale}, ratio={self.ratio}; use two numbers each, the "
                "smaller first, those of scale up to 1"
            )

    def spec(self, name: str) -> FieldSpec:
        return FieldSpec(name, (3, self.size, self.size), np.dtype(np.uint8))

    def memory_spec(self, name: str) -> FieldSpec:
        """Return the layout of decoded images in memory: height, width, channels."""
        return FieldSpec(name, (self.size, self.size, 3), np.dtype(np.uint8))

    def draw(self, seed: int, epoch: int, samples: IntArray) -> NDArray[np.float64]:
        """Return random numbers in [0, 1) for these samples, shape (samples, _DRAWS)."""
        key = _mixed(_mixed(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
        with np.errstate(over="ignore"):
            own = _mixed(samples.astype(np.uint64) + key)
            draws = own[:, None] + np.arange(_DRAWS, dtype=np.uint64) * np.uint64(_GAMMA)
        found: NDArray[np.float64] = (_mixed(draws) >> np.uint64(11)) * 2.0**-53
        return found

    def decode(
        self, data: NDArray[np.uint8], draws: NDArray[np.float64], to: NDArray[np.uint8]
    ) -> None:
        """Decode an image into `to`, of memory_spec(), without the GIL; raises UnreadableImage."""
        if len(data) > 2 and data[:2].tobytes() == _JPEG:
            found = self._decode_jpeg(data, draws)
            if found is not None:
                pixels, part = found
                self._place(pixels, part, draws, to)
                return
        pixels = _decode_by_pillow(data)
        self._place(pixels, self.part(pixels.shape[0], pixels.shape[1], draws), draws, to)

    def _decode_jpeg(
        self, data: NDArray[np.uint8], draws: NDArray[np.float64]
    ) -> tuple[NDArray[np.uint8], tuple[float, float, float, float]] | None:
        """Return the pixels that the used part needs, and the part; None if simplejpeg fails."""
        simplejpeg = _simplejpeg()
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            if height * width > _MOST_PIXELS:
                return None
            left, top, wide, high = self.part(height, width, draws)
            needed = self.size / min(wide, high)  # least scale of each side
            pixels = simplejpeg.decode_jpeg(
                data,
                min_height=math.ceil(height * min(1, needed)),
                min_width=math.ceil(width * min(1, needed)),
                min_factor=2,
            )
        except (ValueError, RuntimeError):
            return None
        down, across = pixels.shape[0] / height, pixels.shape[1] / width
        return pixels, (left * across, top * down, wide * across, high * down)

    def part(
        self, height: int, width: int, draws: NDArray[np.float64]
    ) -> tuple[float, float, float, float]:
        """Return left, top, width and height of the part of an image to use."""
        if self.crop == "center":
            side = min(height, width) * _CENTRAL
            return (width - side) / 2, (height - side) / 2, side, side
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for area, form, x, y in draws[1:].reshape(-1, 4).tolist():
            pixels = height * width * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + form * (high - low))
            wide, tall = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(x * (width - wide + 1)), int(y * (height - tall + 1))
                return left, top, wide, tall
        # The image is too long or too high: use its middle, with the nearest ratio.
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        wide, tall = min(width, max(1, round(height * ratio))), min(height, round(width / ratio))
        return (width - wide) / 2, (height - max(1, tall)) / 2, wide, max(1, tall)

    def _place(
        self,
        pixels: NDArray[np.uint8],
        part: tuple[float, float, float, float],
        draws: NDArray[np.float64],
        to: NDArray[np.uint8],
    ) -> None:
        flip = self.flip and bool(draws[0] < 0.5)
        _scratch.memory = crop_image(
            pixels, part, to, flip=flip, scratch=getattr(_scratch, "memory", None)
        )


def images(
    size: int,
    crop: Crop = "center",
    flip: bool = False,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> ImageDecoder:
    """Make a decoder of images to uint8 of shape (samples, 3, size, size), RGB.

    In memory a pixel's three values lie together (torch's channels_last). Random choices depend
    only on the loader's seed, the epoch and the sample.

    Args:
        size: height and width of the results, pixels.
        crop: "random" uses a part of the image; "center" the middle square of 0.875 of the shorter
            side.
        flip: mirror half of the images.
        scale: range of a random part's area, as a fraction of the image.
        ratio: range of a random part's width / height.

    Raises:
        ValueError: other values.
        MissingExtra: simplejpeg or Pillow is missing (pip install simplejpeg pillow).
    """
    _simplejpeg()
    _pillow()
    return ImageDecoder(size, crop, flip, scale, ratio)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the output function of SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_GAMMA)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
        return mixed


def _simplejpeg() -> Any:
    with needed_for("decoding images", "simplejpeg"):
        import simplejpeg
    return simplejpeg


def _pillow() -> Any:
    with needed_for("decoding images", "pillow"):
        from PIL import Image
    return Image


def _decode_by_pillow(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Decode other formats, and JPEG that simplejpeg cannot decode, to RGB."""
    Image = _pillow()
    try:
        with Image.open(standard_io.BytesIO(data.tobytes())) as opened:
            return np.asarray(opened.convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnreadableImage(lines[0]) from None
