"""`hsgd run` in an allocation of a real Slurm: no -np, no -H, no ssh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolkit.slurm import Slurm

__all__: list[str] = []

pytestmark = pytest.mark.long
HSGD = f"{sys.executable} -m hsgd"
# As Debian's installer leaves it: a host's own name is a loopback address there.
OWN_NAME = """\
sed "s/^.* $(hostname)$/127.0.1.1 $(hostname)/" /etc/hosts > {file}.$(hostname)
exec unshare --mount sh -c 'mount --bind {file}.$(hostname) /etc/hosts && exec {command}'
"""
PROGRAM = """
import os, numpy as np, hsgd
comm = hsgd.Comm()
total = comm.allreduce(np.ones(3))[0]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
said = [os.environ.get(name) for name in names]
how = "MPI" if comm.mpi else "TCP"
line = f"{said} {comm.cross_size} {total} {how} {os.uname()[1]}"
for one in comm.allgather_object(line) if comm.rank == 0 else comm.allgather_object(line) and []:
    print(one)
"""


@pytest.mark.parametrize("way", ["--launcher torchrun", "--min-np 2", "", "srun"])
def test_ranks_run_on_all_nodes_of_the_allocation(slurm: Slurm, tmp_path: Path, way: str) -> None:
    program, job, out = tmp_path / "train.py", tmp_path / "job.sh", tmp_path / "out"
    program.write_text(PROGRAM)
    command = f"{HSGD} run {way} {sys.executable} {program}"
    if way == "srun":
        command = f"{sys.executable} {program}"
    script = tmp_path / "own_name.sh"
    script.write_text(OWN_NAME.format(file=tmp_path / "hosts", command=command))
    job.write_text(f"#!/bin/sh\n{'srun ' if way == 'srun' else ''}sh {script}\n")
    words = ["-N2", "--ntasks-per-node=2", "-o", str(out), str(job)]
    done = slurm.batch(words, timeout_s=180)
    assert done.returncode == 0, done.stderr + out.read_text()
    lines = [line for line in out.read_text().splitlines() if line.startswith("[")]
    lines = [line for line in lines if not line.startswith("[W")]
    how = "MPI" if way == "" else "TCP"
    names = [f"['{rank}', '4', '{rank % 2}']" for rank in range(4)]
    if way == "srun":
        names = ["[None, None, None]"] * 4
    assert lines == [f"{names[rank]} 2 4.0 {how} node{1 + rank // 2}" for rank in range(4)]


def test_the_doctor_visits_all_nodes_of_the_allocation(slurm: Slurm) -> None:
    script = f"cd /; {HSGD} doctor --all-nodes --json"
    done = slurm.run(
        ["salloc", "-N2", "-n2", "srun", "-N1", "-n1", "--overlap", "sh", "-c", script]
    )
    names = [trial["name"] for trial in json.loads(done.stdout)]
    visited = {name.partition(":")[0] for name in names if name.startswith("node")}
    assert len(visited) == 1, done.stdout + done.stderr  # the other one


def test_an_elastic_job_goes_on_without_a_node_that_slurm_takes_away(
    slurm: Slurm, tmp_path: Path
) -> None:
    program, job, out = tmp_path / "train.py", tmp_path / "job.sh", tmp_path / "out"
    program.write_text("""
import sys, time, torch, hsgd.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)
@hvd.elastic.run
def train(state):
    while hvd.size() == 4 or state.step < 3:
        hvd.allreduce(torch.ones(1), name="x")
        state.step += 1
        state.commit()
        if state.step == 3 and hvd.rank() == 0:
            print("steps", hvd.size(), flush=True)
            open(sys.argv[1], "w").close()
        time.sleep(0.05)
train(state)
print("ended with", hvd.size(), flush=True)
""")
    mark = tmp_path / "mark"
    job.write_text(f"""#!/bin/sh
(while [ ! -e {mark} ]; do sleep 0.1; done; scontrol update nodename=node2 state=down reason=test) &
{HSGD} run --min-np 2 {sys.executable} {program} {mark}
""")
    words = ["--no-kill", "-N2", "--ntasks-per-node=2", "-o", str(out)]
    try:
        done = slurm.batch([*words, str(job)], timeout_s=240)
        said = out.read_text()
        assert done.returncode == 0, done.stderr + said
        assert said.count("ended with 2") == 2 and "steps 4" in said
    finally:
        slurm.run(["scontrol", "update", "nodename=node2", "state=resume"])
