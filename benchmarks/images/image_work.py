"""One image: which part of it is taken, and how peers and limits decode and scale it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from random import Random
from typing import Any

import numpy as np

__all__ = [
    "SIZE",
    "Case",
    "Decode",
    "Part",
    "by_opencv",
    "by_pillow",
    "by_simplejpeg",
    "by_torchvision",
    "middle",
]

SIZE = 224
Case = str  # "random": a random part and mirrored or not; "center": the middle
Decode = Callable[[bytes, Case, Random], np.ndarray]  # to (SIZE, SIZE, 3) of uint8
_CENTRAL = 224 / 256


@dataclass(frozen=True)
class Part:
    """What is taken of an image, in its pixels."""

    left: float
    top: float
    width: float
    height: float

    def scaled(self, across: float, down: float) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in an image that was made smaller."""
        right, bottom = self.left + self.width, self.top + self.height
        return self.left * across, self.top * down, right * across, bottom * down


def choose(width: int, height: int, case: Case, random: Random) -> Part:
    """As torchvision's RandomResizedCrop, or Resize(256) and CenterCrop(224)."""
    if case == "random":
        for _ in range(10):
            pixels = width * height * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            wide, high = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
            if 0 < wide <= width and 0 < high <= height:
                return Part(
                    random.randrange(width - wide + 1),
                    random.randrange(height - high + 1),
                    wide,
                    high,
                )
    return middle(width, height)


def middle(width: int, height: int) -> Part:
    """The square of 0.875 of the shorter side."""
    side = min(width, height) * _CENTRAL
    return Part((width - side) / 2, (height - side) / 2, side, side)


def _reduced(data: bytes, case: Case, random: Random) -> tuple[np.ndarray, tuple[float, ...]]:
    """By simplejpeg, reduced by 2, 4 or 8 as far as the part stays as large as what is wanted: the
    rule of hsgd.io. Pixels, and where the part lies in them.
    """
    import simplejpeg

    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    part = choose(width, height, case, random)
    needed = min(1.0, SIZE / min(part.width, part.height))
    pixels = simplejpeg.decode_jpeg(
        data, min_height=math.ceil(height * needed), min_width=math.ceil(width * needed),
        min_factor=2,
    )  # fmt: skip
    return pixels, part.scaled(pixels.shape[1] / width, pixels.shape[0] / height)


def _mirrored(pixels: np.ndarray, case: Case, random: Random) -> np.ndarray:
    return pixels[:, ::-1] if case == "random" and random.random() < 0.5 else pixels


def by_pillow(data: bytes, case: Case, random: Random) -> np.ndarray:
    """Pillow alone; draft() reduces as far as it does by itself."""
    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        width, height = image.size
        part = choose(width, height, case, random)
        needed = min(1.0, SIZE / min(part.width, part.height))
        image.draft("RGB", (math.ceil(width * needed), math.ceil(height * needed)))
        box = part.scaled(image.width / width, image.height / height)
        scaled = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    return _mirrored(np.asarray(scaled), case, random)


def by_simplejpeg(data: bytes, case: Case, random: Random) -> np.ndarray:
    """simplejpeg, and Pillow to scale."""
    from PIL import Image

    pixels, box = _reduced(data, case, random)
    scaled = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
    return _mirrored(np.asarray(scaled), case, random)


def by_opencv(data: bytes, case: Case, random: Random) -> np.ndarray:
    """simplejpeg, and OpenCV to scale, by INTER_AREA, as FFCV does; whole pixels are taken."""
    import cv2

    pixels, box = _reduced(data, case, random)
    left, top, right, bottom = map(round, box)
    scaled = cv2.resize(pixels[top:bottom, left:right], (SIZE, SIZE), interpolation=cv2.INTER_AREA)
    return _mirrored(scaled, case, random)


def by_torchvision(data: bytes, case: Case, random: Random) -> np.ndarray:
    """torchvision's decoder, which cannot reduce, and its scaling."""
    import torch
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2.functional import resized_crop

    pixels: Any = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    part = choose(pixels.shape[2], pixels.shape[1], case, random)
    box = map(round, (part.top, part.left, part.height, part.width))
    scaled = resized_crop(pixels, *box, [SIZE, SIZE], antialias=True)
    return _mirrored(scaled.permute(1, 2, 0).numpy(), case, random)
