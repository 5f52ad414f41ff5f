"""Which programs run, how each is started, and in which environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.rank_command import BENCHMARKS

__all__ = ["PROGRAMS", "Program"]

PLACE = BENCHMARKS.parent / "examples" / "frameworks"
WORKERS = 2


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
    Program(
        "ray_train", "Ray Train, dense layers", _python("train.py", "--workers"), reports=False
    ),
    Program(
        "vllm_llama",
        "vLLM, tensor parallel, Llama, one token a step",
        _python("generate.py", "--tensor-parallel", "--shard", str(WORKERS)),
    ),
)
