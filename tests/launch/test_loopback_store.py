"""`hsgd run --launcher torchrun` on one host: who reaches the store of the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, pathlib, subprocess, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
port = int(os.environ["MASTER_PORT"])
if dist.get_rank() == 0:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.split(":")[1], 16) == port:
                print("listens on", local.split(":")[0], flush=True)
    stranger = (
        "import os, socket, sys\\n"
        "os.getuid() or (os.setgroups([]), os.setgid(65534), os.setuid(65534))\\n"
        "for _ in range(20):\\n"
        "    with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as link:\\n"
        "        link.sendall(os.urandom(4096))\\n"
    )
    subprocess.run([sys.executable, "-c", stranger, str(port)], capture_output=True, timeout=60)
    keys = ["torch.rendezvous." + os.environ["TORCHELASTIC_RUN_ID"]]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    print("pickled state", store.check(keys), flush=True)
    store.set(keys[0], b"rubbish")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_store_of_one_host_is_on_the_loopback_and_takes_no_pickles(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    words = ["run", "--launcher", "torchrun", "-np", "2", sys.executable, str(script)]
    hsgd = Path(sys.executable).with_name("hsgd")
    done = subprocess.run([hsgd, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    listening = [line for line in done.stdout.splitlines() if line.startswith("listens on")]
    assert listening == ["listens on 0100007F"], done.stdout
    assert "pickled state False" in done.stdout
    assert done.stdout.count("sum 2.0") == 2
