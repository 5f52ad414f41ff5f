"""Functions and models with collectives inside torch.compile; what compiles over gloo, compiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolkit.processes import run_marked
from torchrun_runs import here

__all__: list[str] = []

PROGRAM = Path(__file__).with_name("compiled_programs.py")
LIMIT_S = 400.0

Outcomes = dict[str, set[str]]


def outcomes(backend: str, compiler: str, **more: str) -> Outcomes:
    """By case, what came of it on the two ranks."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_marked([*words, str(PROGRAM), backend, compiler], here(**more), LIMIT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) == 2, done.stdout + done.stderr
    return {case: {line[case] for line in lines} for case in lines[0]}


def check(found: Outcomes, bar: Outcomes) -> None:
    assert [case for case, said in bar.items() if said == {"equal"} and found[case] != said] == []
    assert not any(each.startswith("differs") for said in found.values() for each in said)


@pytest.fixture(scope="module")
def bar() -> Outcomes:
    found = outcomes("gloo", "eager")
    equal = [case for case, said in found.items() if said == {"equal"}]
    assert {"ddp", "ddp_python_reducer", "fsdp2", "broadcast", "all_reduce fullgraph"} <= {*equal}
    return found


def test_what_compiles_over_gloo_compiles_over_hsgd(bar: Outcomes) -> None:
    check(outcomes("hsgd", "eager"), bar)


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("backend", ["hsgd", "gloo"])
def test_every_compiler_gives_what_eager_gives(bar: Outcomes, backend: str, compiler: str) -> None:
    check(outcomes(backend, compiler, HSGD_AS_GLOO=str(int(backend == "gloo"))), bar)
