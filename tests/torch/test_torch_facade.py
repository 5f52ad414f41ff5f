"""import hsgd.torch as hvd: every public name of horovod.torch, native or with a clear error."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import hsgd.torch as hvd

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
SOME_RANKS = """
import torch
import hsgd.torch as hvd
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
for ranks in ([0, 2], [0, 1, 2, 3], [0]):
    if rank == 1 and ranks == [0, 2]:
        continue
    try:
        hvd.init(ranks)
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        print(f"{rank}: {hvd.rank()} of {hvd.size()}, {total[0]:g}|", flush=True)
        hvd.shutdown()
    except ValueError as error:
        print(f"{rank}: {error}|", flush=True)
"""
FAMILIES: dict[str, tuple[str, ...]] = {  # modules of hsgd.torch
    "job": ("job.basics", "job.process_sets", "barrier"),
    "operations": (
        "collectives.allreduce",
        "collectives.allgather",
        "collectives.broadcast",
        "collectives.alltoall",
        "collectives.reducescatter",
        "collectives.submission",
    ),
    "models": (
        "functions",
        "optimizer",
        "strategy_table",
        "sync_batch_norm",
        "compression",
    ),
    "elastic": ("elastic", "elastic.recovery_loop", "elastic.state"),
    "constants and errors": ("exceptions",),
}

HOROVODS_OWN = {  # what needs Horovod: without it, and with it
    "tensors on other accelerators": (
        "`ValueError`",
        "Horovod's own where it was built for them, else `ValueError`",
    ),
}

_NATIVE = ("tensors on CPU and CUDA",)

_OF_OTHERS = {  # modules
    "job": ("preempted", "save_and_exit"),
    "models": ("guard",),
    "constants and errors": ("Adasum", "Average", "Sum", "Min", "Max", "Product"),
}
_INTERNAL = {
    "core_errors_as_horovods",
    "hand_over",
    "local_root",
    "named",
    "submit",
    "Distributed",
    "share_optimizer",
    "start_strategy",
    "refuse_options",
    "BUCKET_CAP_MB",
    "Request",
    "STRATEGIES",
    "coordinator_of",
    "reduce_op",
    "NoneCompressor",
    "FP16Compressor",
    "BF16Compressor",
    "Compressor",
    "warn_of_overflow",
}


def table() -> str:
    """Return the table of docs/torch.md."""
    lines = ["| names | without Horovod | with Horovod |", "|---|---|---|"]
    for family, modules in FAMILIES.items():
        names = [name for module in modules for name in _public(module)]
        names += _OF_OTHERS.get(family, ())
        listed = ", ".join(f"`{name}`" for name in sorted(set(names), key=str.lower))
        lines.append(f"| {family}: {listed} | native | native |")
    lines += [f"| {what} | native | native |" for what in _NATIVE]
    for names_of, (without, having) in HOROVODS_OWN.items():
        lines.append(f"| {names_of} | {without} | {having} |")
    return "\n".join(lines)


def _public(module: str) -> list[str]:
    found = importlib.import_module(f"hsgd.torch.{module}")
    prefix = "elastic." if module.startswith("elastic") else ""
    return [prefix + name for name in found.__all__ if name not in _INTERNAL]


SUBMODULES = (
    "mpi_ops",
    "compression",
    "functions",
    "optimizer",
    "sync_batch_norm",
    "elastic",
    "elastic.state",
    "elastic.sampler",
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture(scope="module")
def theirs(horovod: None) -> Any:
    return importlib.import_module("horovod.torch")


def public(module: Any) -> list[str]:
    inner = {"check_extension", "mpi_lib_v2"}  # of Horovod's build
    return [name for name in dir(module) if not name.startswith("_") and name not in inner]


@pytest.mark.long
def test_every_public_name_of_horovod_torch_is_there(theirs: Any) -> None:
    missing = set(public(theirs)) - set(dir(hvd))
    assert not missing
    assert set(hvd.__all__) <= set(dir(hvd))


@pytest.mark.long
@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_have_what_horovods_have(theirs: Any, name: str) -> None:
    ours = importlib.import_module(f"hsgd.torch.{name}")
    their = importlib.import_module(f"horovod.torch.{name}")
    own = [
        n
        for n in public(their)
        if getattr(getattr(their, n), "__module__", "").startswith(f"horovod.torch.{name}")
    ]
    inner = {n for n in own if n.startswith("Horovod") and n != "HorovodInternalError"}
    assert not set(own) - inner - set(dir(ours))


@pytest.mark.long
def test_functions_take_horovods_arguments_in_its_order(theirs: Any) -> None:
    compared = 0
    for name in public(theirs):
        their, our = getattr(theirs, name), getattr(hvd, name)
        if not inspect.isfunction(their) or name in ("init", "shutdown"):
            continue
        expected = list(inspect.signature(their).parameters)
        given = list(inspect.signature(our).parameters)
        assert given[: len(expected)] == expected, name
        compared += 1
    assert compared > 25


def test_importing_needs_no_horovod_and_loads_none() -> None:
    done = run("import sys, hsgd.torch; raise SystemExit('horovod' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"hsgd\.torch.*nothing"):
        _ = hvd.nothing


def test_a_missing_torch_is_named_with_its_remedy() -> None:
    code = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'torch' else find(n, *a)\n"
        "import hsgd.torch\n"
    )
    assert "hsgd.torch needs PyTorch, which is not installed; pip install torch" in run(code).stderr


def test_before_init_names_that_need_a_job_say_so() -> None:
    import torch

    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
        with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
            getattr(hvd, name)()
    assert hvd.is_initialized() is False
    with pytest.raises(hvd.HorovodInternalError, match=r"use hvd\.init\(\)"):
        hvd.allreduce(torch.ones(1))
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        hvd.stop_timeline()


def test_the_table_of_the_docs_is_the_generated_one() -> None:
    assert table() in (ROOT / "docs/torch.md").read_text(), (
        "python tests/torch/test_torch_facade.py prints it"
    )


def test_the_table_has_every_name() -> None:
    listed = table()
    missing = [name for name in hvd.__all__ if f"`{name}`" not in listed]
    assert set(missing) <= {"elastic"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, text: str) -> None:
    from hsgd.torch.settings import HorovodSettings

    with pytest.raises(ValueError, match=f"{variable}={text}: expected seconds from 0"):
        HorovodSettings.from_env({variable: text})


def test_variables_have_horovods_defaults() -> None:
    from hsgd.torch.settings import HorovodSettings

    assert HorovodSettings.from_env({}) == HorovodSettings(True, 60.0, 0.0, None, False)
    read = HorovodSettings.from_env(
        {
            "HOROVOD_STALL_CHECK_DISABLE": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
            "HOROVOD_TIMELINE": "/tmp/t",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        }
    )
    assert read == HorovodSettings(False, 5.0, 0.0, "/tmp/t", True)


@pytest.mark.long
def test_init_with_ranks_is_a_call_of_these_alone(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SOME_RANKS)
    done = mpirun(3, str(script))
    assert done.returncode == 0, done.stderr
    told = sorted(line.strip() for line in done.stdout.split("|") if line.strip())
    advice = "must lie in 0 to 2, and rank {} be one of them; call init() only for those"
    assert told == sorted(
        [
            "0: 0 of 2, 2",
            "2: 1 of 2, 2",
            "0: 0 of 1, 1",
            *(f"{rank}: init: the ranks [0] {advice.format(rank)}" for rank in (1, 2)),
            *(f"{rank}: init: the ranks [0, 1, 2, 3] {advice.format(rank)}" for rank in range(3)),
        ]
    )


if __name__ == "__main__":
    print(table())
