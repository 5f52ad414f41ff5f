"""The process of a candidate of io_images.py: what is measured and checked there."""

from __future__ import annotations

import time
from io import BytesIO
from typing import Any

import numpy as np

from images.image_files import ImageSet
from images.image_loaders import BATCH, CANDIDATES
from images.image_work import SIZE, Case, Part, middle
from studies.io_packages import Candidate, reason_against
from workers.staying_processes import memory_mb, orders

__all__ = ["read"]

_MOST_DIFFERENCE = 8.0  # of 255, mean of an image: grain is lost in one way or another
_CHECKED = 8
_SETTLED = 5  # epochs until memory counts as what it is


def read(name: str, pipe: Any) -> None:
    """Body of the process. Orders: `epoch`, which is answered with seconds and cpu_s of all threads
    and processes; `check`: each image comes once, and in the middle of some pixels are compared
    with Pillow's; `memory`: resident MB after each of some epochs, from the fifth on.
    """
    import torch

    torch.set_num_threads(1)
    candidate = next(each for each in CANDIDATES if each.name == name)
    for package in sorted(candidate.needs()):
        if reason := reason_against(package):
            pipe.send(reason)
            return

    def obey(order: str, images: ImageSet, case: Case, *words: int) -> dict[str, Any]:
        if order == "check":
            _check(candidate, images, case)
            return {}
        if order == "epoch":
            return _epoch(candidate, images, case, *words)
        found = []
        for epoch in range(*words):
            _epoch(candidate, images, case, epoch)
            found.append(round(memory_mb("VmRSS"), 1))
        return {"rss_mb": found[min(_SETTLED, len(found)) - 1 :]}

    orders(pipe, obey)


def _processor_s() -> float:
    """Of this process, of those below it, and of those that ended."""
    import psutil

    own = psutil.Process()
    alive = [own, *own.children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in alive)


def _epoch(candidate: Candidate, images: ImageSet, case: Case, epoch: int) -> dict[str, float]:
    batches = candidate.read(images, case, epoch)
    if candidate.kind == "limit":
        next(batches)
    cpu_s, began, count = _processor_s(), time.perf_counter(), 0
    for batch in batches:
        count += batch if isinstance(batch, int) else len(batch[0])
    seconds, cpu_s = time.perf_counter() - began, _processor_s() - cpu_s
    if count != images.count:
        raise ValueError(f"{count} images came, not {images.count}")
    return {"seconds": seconds, "cpu_s": cpu_s}


def _check(candidate: Candidate, images: ImageSet, case: Case) -> None:
    from PIL import Image

    if candidate.kind == "limit":
        return
    seen: list[int] = []
    compared = set(range(0, images.count, max(1, images.count // _CHECKED)))
    paths = images.paths()
    for pixels, numbers in candidate.read(images, case, 0):
        rows = pixels.permute(0, 2, 3, 1) if pixels.shape[1] == 3 else pixels
        if rows.shape[1:] != (SIZE, SIZE, 3) or len(rows) > BATCH:
            raise ValueError(f"a batch has the shape {tuple(pixels.shape)}")
        for row, number in zip(rows.numpy(), numbers.tolist(), strict=True):
            seen.append(number)
            if case == "center" and number in compared:
                with Image.open(BytesIO(paths[number].read_bytes())) as image:
                    part: Part = middle(*image.size)
                    box = part.scaled(1, 1)
                    wanted = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
                found = np.abs(row.astype(int) - np.asarray(wanted)).mean()
                if found > _MOST_DIFFERENCE:
                    raise ValueError(f"image {number} is off by {found:.1f} of 255 on average")
    if sorted(seen) != list(range(images.count)):
        raise ValueError(f"{len(seen)} images came, {len(set(seen))} different ones")
