"""Which programs run, how each is started, and in which environment."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import installing
from harness.layouts import BENCHMARKS

__all__ = ["PROGRAMS", "Program", "environment", "wheel"]

PLACE = BENCHMARKS.parent / "examples" / "frameworks"
WORKERS = 2
FOLDER = "frameworks"  # in hsgd's cache
INSTALL_LIMIT_S = 1800.0
# Beside requirements.txt: what to take without what it asks for, and what to take away again,
# because it was built for another torch and is not needed.
WITHOUT_DEPENDENCIES = "no-deps.txt"
UNWANTED = "unwanted.txt"


@dataclass(frozen=True)
class Program:
    """A user's program, which knows nothing of hsgd.

    words(bin, workers) is its command without options that all have; what it prints has a line of
    JSON with losses and step_s. One worker alone does the work of one of two.
    """

    name: str
    about: str
    words: Callable[[Path, int], list[str]]
    tolerance: float = 1e-5  # of losses, relative
    reports: bool = True  # what its workers print arrives

    @property
    def folder(self) -> Path:
        return PLACE / self.name


def _torchrun(script: str, *alone: str) -> Callable[[Path, int], list[str]]:
    """`alone`: more options of a worker that runs without others."""

    def words(programs: Path, workers: int) -> list[str]:
        start = [str(programs / "torchrun"), "--standalone", "--nproc-per-node", str(workers)]
        return [*start, script, *(alone if workers == 1 else ())]

    return words


def _python(script: str, option: str, *alone: str) -> Callable[[Path, int], list[str]]:
    """The script starts its workers itself, as many as `option` says."""

    def words(programs: Path, workers: int) -> list[str]:
        start = [str(programs / "python"), script, option, str(workers)]
        return [*start, *(alone if workers == 1 else ())]

    return words


PROGRAMS = (
    Program("trainer", "Hugging Face Trainer over accelerate, BERT", _torchrun("train.py")),
    Program("lightning_ddp", "PyTorch Lightning's DDP, convolutions", _torchrun("train.py")),
    Program(
        "tensor_parallel",
        'transformers, tp_plan="auto", Llama, one token a step',
        _torchrun("score.py", "--shard", str(WORKERS)),
    ),
    Program("graphsage", "PyG's GraphSAGE with DDP", _torchrun("train.py")),
    Program("dlrm", "torchrec's DLRM, sharded tables", _torchrun("train.py")),
    Program("deepspeed_zero", "DeepSpeed's ZeRO 3, transformer", _torchrun("train.py")),
    Program(
        "ray_train", "Ray Train, dense layers", _python("train.py", "--workers"), reports=False
    ),
    Program(
        "vllm_llama",
        "vLLM, tensor parallel, Llama, one token a step",
        _python("generate.py", "--tensor-parallel", "--shard", str(WORKERS)),
    ),
)


def wheel(target: Path) -> Path:
    """hsgd as it lies here, built into `target` by the environment that this runs in. Raises
    PeerMissing.
    """
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    installing.pip("hsgd", [*words, str(BENCHMARKS.parent)], limit_s=INSTALL_LIMIT_S)
    return next(target.glob("hsgd-*.whl"))


def environment(folder: Path, hsgd: Path) -> Path:
    """The folder of the programs of an environment with what `folder` requires, and the wheel.

    Made at the first call; programs with the same requirements share one. Raises PeerMissing.
    """
    names = ("requirements.txt", WITHOUT_DEPENDENCIES, UNWANTED)
    lists = {name: folder / name for name in names if (folder / name).exists()}
    text = "".join(f"{name}\n{path.read_text()}" for name, path in lists.items())
    tag = hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:12]
    with installing.made_once(tag, install=True, kind=FOLDER) as (place, missing):
        python = place / "bin" / "python"
        calls = [["install", "--force-reinstall", "--no-deps", str(hsgd)]]
        if missing:
            print(f"{folder.name}: installing once, into {place}", file=sys.stderr)
            installing.run(folder.name, [sys.executable, "-m", "venv", str(place)])
            options = (["install", "tqdm"], ["install", "--no-deps"], ["uninstall", "--yes"])
            first = zip(names, options, strict=True)
            calls[:0] = [[*words, "-r", str(lists[n])] for n, words in first if n in lists]
        for words in calls:
            installing.pip(folder.name, words, python, limit_s=INSTALL_LIMIT_S)
    return place / "bin"
