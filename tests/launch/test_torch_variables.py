"""Ranks that `hsgd run` starts by mpirun have the variables of torch.distributed."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd.jobs.launch import torch_variables
from hsgd.jobs.launch.mpirun import Host, Launcher
from toolkit.cluster import Cluster
from toolkit.processes import run_marked
from torchrun_runs import JOB_S, here, said

__all__: list[str] = []

HSGD = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("hsgd")
total = torch.ones(3)
dist.all_reduce(total)
place = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
assert len(os.environ["HSGD_JOB_SECRET"]) == 64
print(f"|{dist.get_rank()} of {dist.get_world_size()}, {place}, {total[0]:g}|", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_backend_starts_under_hsgd_run_with_mpi(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = ["run", "--launcher", "mpirun", "--verbose", "-np", "2", sys.executable, str(script)]
    done = run_marked([*HSGD, *words], here(RANK="0", WORLD_SIZE="1"), JOB_S)  # of an image
    assert done.returncode == 0, done.stderr[-3000:]
    assert "HSGD_JOB_SECRET=" not in done.stderr
    assert said(done) == [f"{rank} of 2, ('{rank}', '2'), 2" for rank in range(2)]


@pytest.mark.long
def test_the_backend_starts_on_several_hosts(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = ["run", "--launcher", "mpirun", "-np", "4", "-H", "node1:2,node2:2"]
    command = [*HSGD, *words, sys.executable, str(script)]
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    done = cluster(2).run(command, node=1, env=env, timeout_s=JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said(done) == [f"{rank} of 4, ('{rank % 2}', '2'), 4" for rank in range(4)]


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "far[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


@pytest.mark.parametrize(
    ("hosts", "environ", "placed", "address"),
    [
        ([Host("localhost", 2)], {}, False, "127.0.0.1"),
        ([Host("localhost", 2), Host("far", 2)], {}, False, socket.gethostname()),
        ([Host("far", 2), Host("localhost", 2)], {}, False, "far"),
        ([], SLURM, False, "far1"),
        ([], SLURM, True, None),  # words for mpirun place the ranks
        ([], {}, True, None),
        ([Host("localhost", 2), Host("far", 2)], {}, True, None),
        ([Host("far", 2)], {"MASTER_ADDR": "mine", "MASTER_PORT": "5"}, True, "mine"),
        ([Host("far", 2)], {"MASTER_ADDR": "mine", "MASTER_PORT": "5"}, False, "mine"),
        ([Host("far", 2)], {"MASTER_ADDR": "mine"}, False, "mine"),
    ],
)
def test_rank_0_of_torch_is_on_the_first_host(
    hosts: list[Host], environ: dict[str, str], placed: bool, address: str | None
) -> None:
    found = torch_variables.meeting(hosts, environ, placed=placed)
    assert found.get("MASTER_ADDR") == address
    assert found.keys() == ({"MASTER_ADDR", "MASTER_PORT"} if address else set())


@pytest.mark.parametrize(
    "words",
    [
        "--nolocal",
        "--map-by node:nolocal",
        "--map-by rankfile:file=ranks",
        "--map-by seq",
        "--rankfile ranks",
        "-rf ranks",
        "--mca rmaps_base_no_schedule_local 1",
        "-H far,localhost",
    ],
)
@pytest.mark.parametrize("given", [{}, {"MASTER_ADDR": "far", "MASTER_PORT": "5"}])
def test_nobody_is_told_of_a_wrong_host(words: str, given: dict[str, str]) -> None:
    options = ["run", "--dry-run", "--launcher", "mpirun", "-np", "2", f"--mpi-args={words}"]
    done = run_marked([*HSGD, *options, "train"], here(**given), JOB_S)
    assert done.returncode == 0, done.stderr
    assert ("MASTER_ADDR" in done.stdout) == bool(given)
    assert done.stderr.startswith(f'hsgd: --mpi-args="{words}" place rank 0') != bool(given)


@pytest.mark.parametrize("words", ["--map-by node", "--mca btl_tcp_links 2", "--oversubscribe"])
def test_other_words_for_mpirun_change_nothing(words: str) -> None:
    options = ["run", "--dry-run", "--launcher", "mpirun", "-np", "2", f"--mpi-args={words}"]
    done = run_marked([*HSGD, *options, "train"], here(), JOB_S)
    assert (done.returncode, done.stderr) == (0, "") and "MASTER_ADDR=127.0.0.1" in done.stdout


def test_a_port_that_the_user_gave_alone_is_taken() -> None:
    assert torch_variables.meeting([Host("far", 2)], {"MASTER_PORT": "29500"}) == {
        "MASTER_ADDR": "far",
        "MASTER_PORT": "29500",
    }


def test_a_launcher_that_is_not_known_starts_the_command_as_it_is() -> None:
    unknown = Launcher("mpirun", "unknown MPI", "")
    assert torch_variables.command_of_rank(unknown, ["a", "b"]) == ("a", "b")
