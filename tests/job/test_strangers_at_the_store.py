"""Other users of the host reach the store of a job of `hsgd run`: what they read, and what becomes
of what they write.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsgd.jobs.stores.sealed_store import JOB_SECRET, ForeignValue, draw_job_secret
from toolkit.processes import launch_environ, run_marked

__all__: list[str] = []

JOB_S = 180.0
HSGD = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
# Of another user where root can make one; else a process that was not told the secret.
STRANGER = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist

assert "HSGD_JOB_SECRET" not in os.environ
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
exec(sys.argv[2])
"""
# stranger(words): a process of that user runs these words with the store of the job.
JOB = f"""
import os, subprocess, sys, time
import numpy as np
import hsgd

def stranger(words):
    given = {{name: text for name, text in os.environ.items() if name != "HSGD_JOB_SECRET"}}
    command = [sys.executable, "-c", {STRANGER!r}, os.environ["MASTER_PORT"], words]
    subprocess.run(command, env=given, check=True, timeout=100)

def say(*words):
    print("|", *words, "|", flush=True)

rank = int(os.environ.get("RANK", "-1"))  # an elastic job has none yet
"""
READS = """
comm = hsgd.Comm()
if rank == 0:
    stranger('''for key in store.list_keys():
    if key.startswith("hsgd/"):
        print("|", "read", key, store.get(key), "|", flush=True)
        store.set(key, "rubbish")''')
say("sum", comm.allreduce(np.full(1000, rank + 1.0))[-1])
part = comm.split(0)
say("part", part.allreduce(np.full(1000, rank + 1.0))[-1])
"""
MEETS = """
comm = hsgd.Comm()
if rank == 0:
    stranger('''store.set("hsgd/comm/0/1", "@hsgd-" + 32 * "0" + "#" + 32 * "0")''')
comm.allreduce(np.ones(1))
if rank == 0:
    time.sleep(600)
hsgd.Comm()
say("met")
"""
GROUP = """
import torch, torch.distributed as dist
if rank == 0:
    stranger('''
while not (keys := [key for key in store.list_keys() if key.endswith("/meetings/1")]):
    time.sleep(0.05)
store.set(keys[0].replace("meetings/1", "0/rank/all"), '["", [null, null]]')''')
    time.sleep(600)
dist.init_process_group("hsgd")
say("met")
"""
ELASTIC = """
import hsgd.torch as hvd
hvd.init()
if hvd.rank() == 0:
    stranger('store.set("hsgd/agent/KEY", "1")')
    sys.exit(1)
time.sleep(600)
"""


def run(tmp_path: Path, script: str, options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "job.py"
    path.write_text(JOB + script)
    words = [*HSGD, "run", "-np", "2", *options.split(), sys.executable, str(path)]
    return run_marked(words, launch_environ(OMP_NUM_THREADS="1", HSGD_TIMEOUT_S="60"), JOB_S)


def said(text: str) -> list[str]:
    return [found.strip() for found in re.findall(r"\| (.*?) \|", text)]


@pytest.mark.long
def test_what_a_stranger_reads_lets_nobody_in_and_what_it_writes_later_changes_nothing(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, READS, "--launcher torchrun")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = said(done.stdout)
    read = [line for line in lines if line.startswith("read")]
    assert any(line.startswith("read hsgd/comm/0/0 ") for line in read), done.stdout
    assert not any("@hsgd-" in line or "#" in line for line in read)
    assert lines.count("sum 3.0") == 2 and lines.count("part 3.0") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options", "key"),
    [
        (MEETS, "--launcher torchrun", r"hsgd/comm/0/1"),
        (GROUP, "--launcher torchrun", r"hsgd/0/0/0/rank/all"),
        (ELASTIC.replace("KEY", "events"), "--min-np 2", r"hsgd/agent/events"),
        (ELASTIC.replace("KEY", "finished"), "--min-np 2", r"hsgd/agent/finished"),
    ],
    ids=["Comm", "process group", "elastic: events", "elastic: finished"],
)
def test_what_a_stranger_writes_before_ranks_ends_the_job_with_one_line(
    tmp_path: Path, script: str, options: str, key: str
) -> None:
    done = run(tmp_path, script, options)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "met" not in said(done.stdout)
    line = rf"the key '{key}' of the job's store holds \d+ bytes that no process of this job wrote"
    assert re.search(line, done.stderr), done.stderr[-3000:]


class Hostile:
    """Runs code of its own where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("when", ["before", "after"])
def test_agents_unpickle_only_what_agents_of_their_job_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    import torch.distributed as dist

    from hsgd.jobs.elastic.node_rounds import NodeRounds

    monkeypatch.setenv(JOB_SECRET, draw_job_secret())
    mark = tmp_path / "unpickled"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hostile = base64.b64encode(pickle.dumps(Hostile(mark)))

    def ask() -> None:
        if when == "before":
            store.set("torch.rendezvous.job", hostile)
        rounds = NodeRounds(store, "job", "here", 1)
        store.set("torch.rendezvous.job", hostile)
        rounds.others_wait()

    with pytest.raises(ForeignValue, match=r"the key 'torch\.rendezvous\.job' of the job's store"):
        ask()
    assert not mark.exists()
