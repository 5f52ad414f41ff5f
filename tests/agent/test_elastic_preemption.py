"""Signals to an elastic job: its ranks save together, for as long as HSGD_ABORT_AFTER_S allows."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from elastic_jobs import HSGD, lines, watched
from toolkit.processes import launch_environ

__all__: list[str] = []

pytestmark = pytest.mark.long

PROGRAM = """
import pathlib, sys, time, torch
import hsgd.torch as hvd

folder = pathlib.Path(sys.argv[1])
hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

def save():
    print("|saves|", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "saved").write_text(str(hvd.size()))

# Its worker must outlive the signal: a rank whose loader is broken saves nothing.
rows = torch.utils.data.DataLoader(torch.ones(1_000_000, 2), num_workers=1)
for step, row in enumerate(rows):
    optimizer.zero_grad()
    model(row).sum().backward()
    optimizer.step()
    if hvd.preempted():
        hvd.save_and_exit(save)
    if step == 2:
        print("|trains|", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_of_an_elastic_job_save_after_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    words = [*HSGD, "run", "-np", "2", "--min-np", "1"]
    words += [sys.executable, "-c", PROGRAM, str(tmp_path)]
    # Six seconds are longer than ranks get if the job ends for another reason.
    with watched([*words, "6"], launch_environ()) as job:
        job.wait_for(lambda text: len(lines(text, "trains")) == 2)
        job.process.send_signal(number)
        code = job.end()
    assert code == (143 if number == signal.SIGTERM else 0), job.text
    assert (tmp_path / "saved").read_text() == "2", job.text
    assert "hsgd: " in job.text and "was ended by" not in job.text


@pytest.mark.parametrize("hosts", ["here", "script"])
def test_a_second_signal_ends_ranks_that_save(tmp_path: Path, hosts: str) -> None:
    words = [*HSGD, "run", "-np", "2", "--min-np", "1"]
    if hosts == "script":  # with a driver, as on several hosts
        script = tmp_path / "hosts.sh"
        script.write_text("#!/bin/sh\necho localhost:2\n")
        script.chmod(0o755)
        words += ["--host-discovery-script", str(script)]
    words += [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environ = launch_environ() | {"HSGD_ABORT_AFTER_S": "0"}  # as long as it takes
    with watched([*words, "300"], environ) as job:
        job.wait_for(lambda text: len(lines(text, "trains")) == 2)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for(lambda text: lines(text, "saves") != [])
        job.process.send_signal(signal.SIGTERM)
        code = job.end()
    assert code == 143, job.text
    assert not (tmp_path / "saved").exists()
