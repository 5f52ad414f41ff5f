"""Jobs that save before Slurm ends them, and go on after they were put back into the queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.slurm import Slurm

__all__: list[str] = []

pytestmark = pytest.mark.long
PYTHON = sys.executable
JOB_S = 180.0
ELASTIC = f"{PYTHON} -m hsgd run --min-np 2"

# Counts steps in a checkpoint; the first run is asked to stop by `scancel` or its own end.
TRAIN = """
import faulthandler, os, pathlib, subprocess, sys, time, torch
import hsgd

front, folder, how = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
if front == "hvd":
    import hsgd.torch as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
else:
    import torch.distributed as dist
    dist.init_process_group("hsgd")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = folder / "step"
first = int(saved.read_text()) if saved.exists() else 0
for step in range(first, 200):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    slow = how in ("clock", "limit") and not first  # until 30 s of 180, or the whole time, are over
    if hsgd.preempted(within_s=150 if slow and how == "clock" else 0):
        (folder / f"left-{rank}").write_text(str(step))
        hsgd.save_and_exit(lambda: saved.write_text(str(step + 1)))
    job = os.environ["SLURM_JOB_ID"]
    commands = {
        "USR1": f"scancel -s USR1 {job}",
        "batch": f"scancel --batch -s USR1 {job}",
        "cancel": f"scancel {job}",
        "urgent": "sbatch -p urgent -N2 --exclusive -o /dev/null --wrap true",
    }
    if step == 20 and rank == size - 1 and not first and how in commands:
        subprocess.run(commands[how].split())  # is signalled, too
    time.sleep(0.5 if slow else 0.02)
faulthandler.dump_traceback_later(60)  # a rank that does not end then shows where it is
print("done", rank, first, os.environ.get("SLURM_RESTART_COUNT"), flush=True)
"""


def until(out: Path, condition: Callable[[str], bool]) -> None:
    """Wait until a job has written what fulfils a condition."""
    end = time.monotonic() + JOB_S
    while not (out.exists() and condition(out.read_text())):
        assert time.monotonic() < end, out.read_text() if out.exists() else "nothing"
        time.sleep(0.1)


def submit(
    slurm: Slurm, folder: Path, front: str, how: str, *options: str, launcher: str = "srun"
) -> Path:
    """Submit a job that trains on three ranks; return the file of what it writes."""
    (folder / "train.py").write_text(TRAIN)
    script, command = folder / "job.sh", f"{launcher} {PYTHON} {folder}/train.py {front} {folder}"
    if how == "batch":  # as with --signal=B:USR1@60
        script.write_text(f"#!/bin/sh\ntrap 'kill -USR1 $!' USR1\n{command} {how} &\nwait; wait\n")
    else:
        script.write_text(f"#!/bin/sh\n{command} {how}\n")
    words = ["sbatch", "--requeue", "-N2", "-n3", *options]
    slurm.run([*words, "-o", str(folder / "out"), str(script)])
    return folder / "out"


@pytest.mark.parametrize(
    ("front", "how", "launcher"),
    [
        ("hvd", "USR1", "srun"),
        ("ddp", "clock", "srun"),
        ("ddp", "limit", "srun"),
        ("ddp", "urgent", "srun"),
        ("hvd", "batch", ELASTIC),
    ],
    ids=["signal", "clock", "limit", "urgent", "elastic"],
)
def test_a_job_saves_is_requeued_and_goes_on(
    slurm: Slurm, tmp_path: Path, front: str, how: str, launcher: str
) -> None:
    minutes = "-t1" if how == "limit" else "-t3"
    out = submit(slurm, tmp_path, front, how, minutes, "--open-mode=append", launcher=launcher)
    until(out, lambda text: text.count("done") == 3)
    slurm.wait_until_over(JOB_S)
    text = out.read_text()
    left = {(tmp_path / f"left-{rank}").read_text() for rank in range(3)}
    assert len(left) == 1, text
    first = int(left.pop()) + 1
    assert f"hsgd: {'the job' if how == 'clock' else ''}" in text and "is requeued" in text
    lines = sorted(line for line in text.splitlines() if line.startswith("done"))
    assert lines == [f"done {rank} {first} 1" for rank in range(3)], text


def test_a_job_that_is_cancelled_saves_and_is_not_put_back(slurm: Slurm, tmp_path: Path) -> None:
    out = submit(slurm, tmp_path, "ddp", "cancel", "-t30")
    slurm.wait_until_over(JOB_S)
    text = out.read_text()
    assert (tmp_path / "step").exists() and "done" not in text, text
    assert "is not requeued: it was cancelled" in text, text
