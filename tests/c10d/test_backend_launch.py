"""Backend "hsgd" under the launchers: mpirun, torchrun on one node and on several.

Run under them, this file is the program of the ranks: `test_backend_launch.py CASE`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsgd.jobs.environment import launcher_variables
from tiers import short_form
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

JOB_S = 120.0
Job = Callable[..., subprocess.CompletedProcess[str]]


def torchrun(*options: str, case: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, __file__, case]


def program(case: str) -> None:
    """One rank of a job. Nothing of hsgd is imported before torch knows the backend."""
    import torch
    import torch.distributed as dist

    limit = __import__("datetime").timedelta(seconds=60)
    dist.init_process_group("hsgd", timeout=limit)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    if case in ("killed", "failed"):
        lost(rank, size, case)
        return
    from backend_programs import run_collectives

    results = run_collectives(rank, size)
    numbers = torch.randn(70001, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(numbers)
    sums: list[Any] = [None] * size
    dist.all_gather_object(sums, hash(tuple(numbers.tolist())))
    comm = group._comm  # type: ignore[union-attr]
    report = {
        "rank": rank,
        "results": results,
        "alike": len(set(sums)) == 1,
        "way": type(comm).__name__,
        "layout": [comm.local_size, comm.cross_size],
        "mpi": "mpi4py.MPI" in sys.modules,
        "horovod": "horovod" in sys.modules,
    }
    dist.destroy_process_group()
    report["threads"] = [each.name for each in threading.enumerate() if each.name == "hsgd"]
    folder = Path(os.environ["REPORTS"])
    (folder / f"{rank}.json").write_text(json.dumps(report))


def lost(rank: int, size: int, case: str) -> None:
    """The last rank dies, or ends by an exception; the others say what they see."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others before they see it
    if rank == size - 1:
        if case == "failed":
            raise RuntimeError("this rank fails")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(50000))
        text = "nothing happened"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    (Path(os.environ["REPORTS"]) / f"{rank}.txt").write_text(text)
    os._exit(3)


def reports(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda report: int(report["rank"]))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What gloo gives for so many ranks."""
    found: dict[int, list[dict[str, Any]]] = {}

    def get(size: int) -> list[dict[str, Any]]:
        if size not in found:
            from backend_programs import run_what_gloo_has
            from gloo_reference import over_gloo

            path = str(tmp_path_factory.mktemp("gloo") / "store")
            found[size] = over_gloo(size, path, run_what_gloo_has)
        return found[size]

    return get


def check(folder: Path, expected: list[dict[str, Any]], way: str, layout: list[int]) -> None:
    seen = reports(folder)
    assert [report["rank"] for report in seen] == list(range(len(expected)))
    for report, results in zip(seen, expected, strict=True):
        for name, values in results.items():
            assert report["results"][name] == json.loads(json.dumps(values)), name
        assert report["alike"] and not report["horovod"] and report["threads"] == []
        assert (report["way"], report["layout"]) == (way, layout)


def here(folder: Path, **more: str) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ, "REPORTS": str(folder), **more}


@pytest.mark.parametrize("size", short_form("torch", [1, 3], keep=[1]))
def test_torchrun_on_one_node_uses_shared_memory_without_mpi(
    tmp_path: Path, expected: Callable[[int], list[dict[str, Any]]], size: int
) -> None:
    command = torchrun("--standalone", f"--nproc-per-node={size}", case="collectives")
    done = run_marked(command, here(tmp_path), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, expected(size), "Comm", [size, 1])
    assert not any(report["mpi"] for report in reports(tmp_path))


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}
WAYS = {
    "mpirun": ({"OMPI_COMM_WORLD_RANK": "0"}, "two-level collectives over MPI"),
    "torchrun, one node": (
        {**TORCHRUN, "WORLD_SIZE": "2"},
        "shared memory of this node, without MPI",
    ),
    "torchrun, two nodes": (
        {**TORCHRUN, "WORLD_SIZE": "4"},
        "shared memory inside nodes, TCP between their leaders, without MPI",
    ),
    "torchrun under mpirun": (
        {**TORCHRUN, "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        "shared memory of this node, without MPI",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_the_backend_would_use_is_told_for_each_launcher(way: str) -> None:
    environ, text = WAYS[way]  # hsgd info passes its own
    assert launcher_variables.describe(environ) == text


def rendezvous(address: str, port: int = 29517) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


MPI_MAIN = """
import os, sys
os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
sys.path.insert(0, {tests!r})
from test_backend_launch import program
program(sys.argv[1])
"""


@pytest.fixture
def mpi_main(tmp_path: Path) -> Path:
    """torch's env:// wants names of its own, which scripts set from mpirun's."""
    path = tmp_path / "main.py"
    path.write_text(MPI_MAIN.format(tests=str(Path(__file__).parent)))
    return path


def test_mpirun_uses_mpi(
    tmp_path: Path, mpirun: Job, mpi_main: Path, expected: Callable[[int], list[dict[str, Any]]]
) -> None:
    env = {"REPORTS": str(tmp_path), **rendezvous("127.0.0.1")}
    done = mpirun(3, mpi_main, "collectives", env=env, timeout_s=JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, expected(3), "Comm", [3, 1])
    assert all(report["mpi"] for report in reports(tmp_path))


@pytest.mark.torch
def test_mpirun_between_nodes_uses_the_two_level_pipeline(
    tmp_path: Path,
    cluster: Callable[..., Cluster],
    mpi_main: Path,
    expected: Callable[[int], list[dict[str, Any]]],
) -> None:
    env = {"REPORTS": str(tmp_path), **rendezvous("10.99.0.1"), "GLOO_SOCKET_IFNAME": "eth0"}
    argv = [sys.executable, str(mpi_main), "collectives"]
    done = cluster(2).mpirun(4, argv, hosts="node1:2,node2:2", env=env, timeout_s=JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, expected(4), "Comm", [2, 2])


def torchrun_on_nodes(
    nodes: Cluster, folder: Path, counts: list[int], case: str
) -> list[subprocess.CompletedProcess[str]]:
    """One torchrun on each node, as on a cluster."""
    found: list[Any] = [None] * len(counts)

    def run(node: int) -> None:
        command = torchrun(
            f"--nnodes={len(counts)}",
            f"--node-rank={node}",
            f"--nproc-per-node={counts[node]}",
            "--master-addr=10.99.0.1",
            "--master-port=29518",
            case=case,
        )
        env = {"REPORTS": str(folder), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        found[node] = nodes.run(command, node=node + 1, env=env, timeout_s=JOB_S)

    threads = [threading.Thread(target=run, args=(node,)) for node in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_torchrun_on_several_nodes_uses_shared_memory_inside_and_tcp_between(
    tmp_path: Path,
    cluster: Callable[..., Cluster],
    expected: Callable[[int], list[dict[str, Any]]],
) -> None:
    for done in torchrun_on_nodes(cluster(2), tmp_path, [2, 2], "collectives"):
        assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, expected(4), "Comm", [2, 2])
    assert not any(report["mpi"] for report in reports(tmp_path))


@pytest.mark.parametrize("nodes", short_form("torch", [1, 2], keep=[1]))
def test_a_killed_rank_is_named_on_all_others(
    tmp_path: Path, request: pytest.FixtureRequest, nodes: int
) -> None:
    if nodes == 1:
        command = torchrun("--standalone", "--nproc-per-node=3", case="killed")
        done = [run_marked(command, here(tmp_path), JOB_S)]
    else:
        done = torchrun_on_nodes(request.getfixturevalue("cluster")(2), tmp_path, [2, 2], "killed")
    size = 3 if nodes == 1 else 4
    assert any(each.returncode for each in done)
    for rank in range(size - 1):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert text.startswith("PeerLost: ") and f"rank {size - 1} " in text, text


def test_a_rank_that_leads_its_node_and_fails_is_named_on_the_other(
    tmp_path: Path, cluster: Callable[..., Cluster]
) -> None:
    done = torchrun_on_nodes(cluster(2), tmp_path, [1, 1], "failed")
    assert any(each.returncode for each in done)
    text = (tmp_path / "0.txt").read_text()
    assert text.startswith("PeerLost: ") and "rank 1 " in text, text
    assert text.endswith("raised RuntimeError: this rank fails"), text


if __name__ == "__main__":
    program(sys.argv[1])
