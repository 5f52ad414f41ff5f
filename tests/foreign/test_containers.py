"""Jobs in containers: all ranks in one, or a container for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from containers import CONTAINERS
from elastic_jobs import HSGD
from toolkit.processes import launch_environ, run_marked, run_together
from torchrun_runs import free_port

__all__: list[str] = []

pytestmark = pytest.mark.long
LIMIT_S = 120.0
PROGRAM = str(Path(__file__).with_name("container_program.py"))


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What operators of clusters of containers set for torch."""
    return {
        **launch_environ(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_apart(container: str, size: int, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a rank in each of `size` containers."""
    port = free_port()
    commands = [
        [
            "env",
            *(f"{key}={value}" for key, value in variables(rank, size, port).items()),
            *CONTAINERS[container].command(sys.executable, PROGRAM, *words),
        ]
        for rank in range(size)
    ]
    return run_together(commands, dict(os.environ), LIMIT_S)


@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "docker"])
def test_ranks_in_containers_of_their_own_train(container: str) -> None:
    for rank, done in enumerate(run_apart(container, 2)):
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"rank {rank} of 2, local 2: all is well" in done.stdout


@pytest.mark.parametrize("container", [name for name in CONTAINERS if name != "docker"])
def test_a_rank_that_dies_in_its_container_is_named(container: str) -> None:
    first, second = run_apart(container, 2, "dies")
    assert second.returncode == 7, second.stderr
    assert "PeerLost" in first.stdout and "rank 1" in first.stdout, first.stdout + first.stderr


@pytest.mark.parametrize("container", ["docker", "no pidfd, no CMA"])
def test_a_job_inside_one_container(container: str) -> None:
    words = [*HSGD, "run", "-np", "2", "--launcher", "torchrun", sys.executable, PROGRAM]
    done = run_marked(CONTAINERS[container].command(*words), launch_environ(), LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all is well") == 2


@pytest.mark.parametrize("container", CONTAINERS)
def test_doctor_finds_no_problem_in_a_container_with_a_home(container: str) -> None:
    words = CONTAINERS[container].command("env", "HOME=/tmp", *HSGD, "doctor")
    done = run_marked(words, launch_environ(), LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_says_that_mpirun_wants_a_home() -> None:
    done = run_marked(CONTAINERS["apptainer"].command(*HSGD, "doctor"), launch_environ(), LIMIT_S)
    assert done.returncode == 1 and "export HOME=/tmp" in done.stdout, done.stdout
