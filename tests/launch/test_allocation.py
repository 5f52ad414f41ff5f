"""`hsgd run` in an allocation of a resource manager uses all of its hosts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd import LaunchError
from hsgd.jobs.launch import launch, without_mpi
from hsgd.jobs.launch.allocation import allocation, spread
from hsgd.jobs.launch.mpirun import Launcher
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

JOB_S = 120.0
HSGD = [sys.executable, "-c", "import sys; from hsgd.tools.cli import main; sys.exit(main())"]
TWO = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}


def slurm(names: str, tasks: str, cores: str = "") -> dict[str, str]:
    found = {"SLURM_JOB_NODELIST": names, "SLURM_TASKS_PER_NODE": tasks}
    return {**TWO, **found, **({"SLURM_JOB_CPUS_PER_NODE": cores} if cores else {})}


@pytest.mark.parametrize(
    ("environ", "places"),
    [
        (slurm("node[1-2,08-10],login", "2(x3),1(x3)"), "node1:2 node2:2 node08:2 node09:1"),
        (slurm("r[1-2]n[1-2]", "3(x4)"), "r1n1:3 r1n2:3 r2n1:3 r2n2:3"),
        (slurm("a,b", "1(x2)", "16,3"), "a:16 b:3"),  # tasks were not asked for
        ({"LSB_MCPU_HOSTS": "a 2 b 3"}, "a:2 b:3"),
        ({"LSB_HOSTS": "a a b"}, "a:2 b:1"),
    ],
)
def test_hosts_and_slots_are_read(environ: dict[str, str], places: str) -> None:
    found = allocation(environ, 7)
    assert found is not None
    assert [f"{host.name}:{host.slots}" for host in found.hosts][:4] == places.split()


def test_this_host_is_known_by_the_name_that_slurm_gave_it() -> None:
    alone = {**slurm("vn1", "4"), "SLURMD_NODENAME": "vn1"}
    assert spread(alone, 4) == ()
    found = allocation({**slurm("vn[1-2]", "2(x2)"), "SLURMD_NODENAME": "vn2"}, 4)
    assert found is not None and [host.is_here for host in found.hosts] == [False, True]


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "OAR_NODEFILE", "COBALT_NODEFILE"])
def test_a_file_names_a_host_once_for_each_slot(tmp_path: Path, name: str) -> None:
    (tmp_path / "nodes").write_text("a.cluster\na.cluster\nb.cluster\n")
    found = allocation({name: str(tmp_path / "nodes")}, 3)
    assert found is not None and [*map(str, found.hosts)] == ["a.cluster:2", "b.cluster:1"]


def test_a_file_of_grid_engine_has_the_slots(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a 2 all.q@a UNDEFINED\nb 4 all.q@b UNDEFINED\n")
    found = allocation({"PE_HOSTFILE": str(tmp_path / "nodes")}, 3)
    assert found is not None and [*map(str, found.hosts)] == ["a:2", "b:4"]


@pytest.mark.parametrize(("ranks", "counts"), [(1, [1]), (2, [1, 1]), (5, [3, 2]), (9, [6, 3])])
def test_ranks_are_spread_over_all_hosts(ranks: int, counts: list[int]) -> None:
    hosts = spread(slurm("a,b", "1(x2)", "16,3"), ranks)
    assert [host.slots for host in hosts] == counts


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (slurm("a,b", "2(x2)"), "9 ranks, and SLURM_JOB_NODELIST=a,b has 4 slots (a:2, b:2)"),
        (slurm("a[1-", "2"), '"[1-" is no list of hosts'),
        (slurm("a[1-99999999999]", "2"), "no range of hosts"),
        (slurm("a,b", "2"), "nor SLURM_JOB_CPUS_PER_NODE has a number for each of these 2 hosts"),
        (slurm("a,b", "two"), '"two" is no number of tasks'),
        ({"PBS_NODEFILE": "/nowhere/nodes"}, "PBS_NODEFILE=/nowhere/nodes"),
        ({"LSB_MCPU_HOSTS": "a 2 b"}, "a host has no number of slots"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(environ: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError) as raised:
        spread(environ, 9)
    assert text in str(raised.value) and "\n" not in str(raised.value)
    assert "-H" in str(raised.value)


def test_torchrun_starts_ranks_on_all_hosts() -> None:
    commands = without_mpi.plan(["x"], 4, None, TWO, [])
    starts = [["ssh", "-x", "--", f"node{number}"] for number in (1, 2)]
    assert [words[:4] for words in commands] == starts
    assert all("--nproc-per-node=2" in words[-1] for words in commands)
    (here,) = without_mpi.plan(["x"], 4, None, {"SLURM_JOB_ID": "7"}, [])
    assert here[0] == sys.executable


@pytest.mark.parametrize(
    ("kind", "environ", "hosts"),
    [
        ("Open MPI", {"LSB_JOBID": "7", "LSB_HOSTS": "a a b b"}, "a:2,b:2"),
        ("Open MPI", TWO, None),  # it reads these itself
        ("MPICH", {"LSB_JOBID": "7", "LSB_HOSTS": "a a b b"}, None),
        ("MPICH", {}, "localhost:4"),
    ],
)
def test_mpirun_gets_the_hosts_that_it_does_not_know(
    kind: str, environ: dict[str, str], hosts: str | None
) -> None:
    assert launch._hosts_for_mpirun(Launcher("mpirun", kind, "5"), 4, environ) == hosts


@pytest.mark.long
@pytest.mark.parametrize("words", [["--launcher", "torchrun"], ["--min-np", "4"]])
def test_a_job_runs_on_all_hosts_of_its_allocation(
    tmp_path: Path, cluster: Callable[..., Cluster], words: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import hsgd\nc = hsgd.Comm()\nprint(f'|{c.rank} {c.nodes}|', flush=True)")
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode1\nnode2\nnode2\n")
    env = {"PBS_JOBID": "7", "PBS_NODEFILE": str(hosts), "HSGD_INTERFACES": "eth0"}
    command = [*HSGD, "run", "-np", "4", *words, sys.executable, str(script)]
    done = cluster(2).run(command, node=1, env=env, timeout_s=JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(filter(None, (each.strip() for each in done.stdout.split("|"))))
    assert said == [f"{rank} [0, 0, 1, 1]" for rank in range(4)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TWO, "SLURM_NTASKS": "3"}, "-np 3, by SLURM_NTASKS=3"),
        (TWO, "-np 4, by SLURM_JOB_NODELIST=node[1-2]"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_CPUS_PER_NODE": "6"},
            "-np 6, by SLURM_JOB_NODELIST=a",
        ),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 3"}, "-np 5, by LSB_MCPU_HOSTS=a 2 b 3"),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "nodes"}, "-np 3, by PBS_NODEFILE=nodes"),
        ({"PE_HOSTFILE": "slots"}, "-np 6, by PE_HOSTFILE=slots"),
    ],
)
def test_a_job_without_a_number_takes_that_of_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str
) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    (tmp_path / "slots").write_text("a 2 all.q@a UNDEFINED\nb 4 all.q@b UNDEFINED\n")
    words = [*HSGD, "run", "--dry-run", "--launcher", "torchrun", "true"]
    monkeypatch.chdir(tmp_path)
    done = run_marked(words, {**os.environ, **environ}, JOB_S)
    assert (done.returncode, done.stderr) == (0, f"hsgd: {expected}\n")
    ranks = [int(found) for found in re.findall(r"--nproc-per-node=(\d+)", done.stdout)]
    assert sum(ranks) == int(expected.split()[1].rstrip(","))


@pytest.mark.parametrize("environ", [{}, {"SLURM_NTASKS": "3"}, {"SLURM_JOB_ID": "7"}])
@pytest.mark.parametrize("words", [[], ["-H", "node1:2"]])
def test_a_job_without_a_number_is_refused_elsewhere(
    environ: dict[str, str], words: list[str]
) -> None:
    given = {**os.environ, **environ, **(TWO if words else {})}
    done = run_marked([*HSGD, "run", "--dry-run", *words, "true"], given, JOB_S)
    assert done.returncode == 2
    assert done.stderr.endswith("the following arguments are required: -np/-n\n")


def test_an_elastic_job_without_a_number_takes_all_slots() -> None:
    words = ["run", "--dry-run", "--min-np", "1"]
    for more, places in ([], "node1:2, node2:2"), (["-np", "2"], "node1:1, node2:1"):
        done = run_marked([*HSGD, *words, *more, "true"], {**os.environ, **TWO}, JOB_S)
        assert done.returncode == 0, done.stderr
        assert f" ranks on {places}: true" in done.stdout


@pytest.mark.parametrize("words", [["-np", "2"], ["--min-np", "1"]])
def test_a_launcher_that_starts_several_launchers_is_refused(words: list[str]) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    done = run_marked([*HSGD, "run", *words, "true"], {**os.environ, **step}, JOB_S)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: srun (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2) started ")


def test_ranks_of_torch_around_a_launcher_are_named() -> None:
    environ = {**os.environ, "RANK": "3", "WORLD_SIZE": "7"}
    done = run_marked([*HSGD, "run", "--dry-run", "-np", "2", "true"], environ, JOB_S)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: RANK=3, WORLD_SIZE=7: not those of this job")
