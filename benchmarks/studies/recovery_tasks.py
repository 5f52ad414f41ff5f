"""What recovery_worker.py trains on: scikit-learn's digits, and characters of Python's sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

__all__ = ["SAMPLES", "Arrays", "write_samples"]

Arrays = Mapping[str, np.ndarray]

CONTEXT = 64  # characters of a sample
SOURCES = ("argparse", "ast", "difflib", "doctest", "inspect", "pickle", "subprocess", "tarfile")
TEST_SHARE = 0.1


def digits() -> Arrays:
    """Images of 64 numbers in 0..1; a fifth for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    image = (found.data[order] / 16).astype(np.float32)
    label = found.target[order].astype(np.int64)
    held = len(label) // 5
    return {
        "input": image[held:],
        "target": label[held:],
        "test_input": image[:held],
        "test_target": label[:held],
    }


def characters() -> Arrays:
    """Windows of modules of the standard library, and the same one character on."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)
    count = (len(codes) - 1) // CONTEXT
    inputs = codes[: count * CONTEXT].reshape(count, CONTEXT)
    targets = codes[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    held = int(count * TEST_SHARE)
    order = np.random.default_rng(0).permutation(count)
    test, learn = order[:held], order[held:]
    return {
        "input": inputs[learn],
        "target": targets[learn],
        "test_input": inputs[test],
        "test_target": targets[test],
    }


SAMPLES: Mapping[str, Callable[[], Arrays]] = {"digits": digits, "gpt": characters}


def write_samples(task: str, folder: Path) -> Path:
    """The file of a task's samples, which is made where it is not there yet; local."""
    path = folder / f"{task}.npz"
    if not path.exists():
        np.savez(path, **SAMPLES[task]())
    return path
