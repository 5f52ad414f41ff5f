"""The batch scripts of the pages, as a user would submit them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.slurm import Slurm

__all__: list[str] = []

pytestmark = pytest.mark.long
DOCS = Path(__file__).resolve().parents[2] / "docs"
# Light: each rank of the pages' sizes is a process here.
TRAIN = """
import numpy as np, hsgd
hsgd.init()
from hsgd.world import comm
total = comm().allreduce(np.ones(5))
print("trained", hsgd.rank(), total[0], flush=True)
hsgd.shutdown()
"""
SCRIPTS = {
    f"{page.name}:{number}": script
    for page in sorted(DOCS.rglob("*.md"))
    for number, script in enumerate(
        re.findall(r"^```sh\n(#!/bin/sh\n#SBATCH.*?)^```", page.read_text(), re.M | re.S)
    )
}


@pytest.fixture(scope="module")
def large() -> Iterator[Slurm]:
    """Nodes that claim as many cores as the pages ask for."""
    with Slurm(nodes=2, cpus=16) as slurm:
        yield slurm


def test_the_pages_have_scripts() -> None:
    assert {name.partition(":")[0] for name in SCRIPTS} >= {"slurm.md", "preemption.md"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_batch_script_of_a_page_trains(large: Slurm, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPTS[name])
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done: subprocess.CompletedProcess[str] = large.batch(
        [f"--chdir={tmp_path}", f"--export=ALL,PATH={path}", "-oout", "job.sh"],
        env={"OMP_NUM_THREADS": "1"},
    )
    said = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    assert done.returncode == 0, done.stderr + said
    asked = re.findall(r"--(nodes|ntasks-per-node)=(\d+)", SCRIPTS[name])
    ranks = 1
    for _, count in asked:
        ranks *= int(count)
    lines = sorted(line for line in said.splitlines() if line.startswith("trained"))
    assert lines == sorted(f"trained {rank} {float(ranks)}" for rank in range(ranks)), said
