"""Comm.over_store: ranks of several nodes that meet through a store, with TCP between nodes.

Nodes are pretended, by a layout that is given instead of found, but for the tests on virtual nodes.
Run under mpirun, this file is the program of their ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm, NotifiedWindow
from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, HsgdError
from outcomes import told_by
from own_sockets import tcp_sockets
from pretended_nodes import meet
from ranks import PATIENT, Ranks, Seat
from toolkit.cluster import Cluster
from toolkit.few_descriptors import few_descriptors
from toolkit.forked_child import in_forked_child

__all__: list[str] = []

MOST_RANKS = 4
JOB_S = 120.0
DETECTED_S = 2.0
LAYOUTS = {
    "1": [0],
    "1+1": [0, 1],
    "3": [0, 0, 0],
    "2+1": [0, 0, 1],
    "2+2": [0, 0, 1, 1],
    "2+1+1": [0, 0, 1, 2],
    "in turns": [0, 1, 0, 1],
}
COUNTS = (1, 1000, 100_003)


def results(comm: Comm) -> list[Any]:
    """Of every collective, over sizes on each of its ways."""
    found: list[Any] = []
    for count in COUNTS:
        mine = np.random.default_rng(count + comm.rank).standard_normal(count).astype(np.float32)
        found.append(comm.allreduce(mine).tobytes())
        found.append(comm.broadcast(mine.copy(), comm.size - 1).tobytes())
        found.append(comm.allgather(mine[: count - comm.rank]).tobytes())
        whole = np.random.default_rng(comm.rank).standard_normal((comm.size, count))
        found.append(comm.alltoall(whole).tobytes())
        found.append(comm.reduce_scatter(whole)[0].tobytes())
    comm.barrier()
    return found


def do_allocate_in_vain(seat: Seat, folder: str, nodes: list[int], victim: int) -> tuple[int, str]:
    """Memory that all share, where no file of the victim may grow."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with meet(seat, folder, nodes) as comm:
        if comm.rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            comm.empty(100_000, np.float32)
        except HsgdError as error:
            return error.rank, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return -1, "allocated"


@pytest.mark.parametrize(
    ("nodes", "victim"), [("2+2", 0), ("2+2", 2), ("in turns", 0), ("in turns", 1)]
)
def test_all_nodes_name_the_rank_that_cannot_share_memory(
    ranks: Ranks, tmp_path: Path, nodes: str, victim: int
) -> None:
    """Its node has heard from it why, and blames it before the others, too."""
    found = ranks.run(do_allocate_in_vain, str(tmp_path), LAYOUTS[nodes], victim)
    assert [rank for rank, _ in found] == [victim] * 4, found


def do_collectives(seat: Seat, folder: str, nodes: list[int]) -> tuple[Any, ...]:
    with meet(seat, folder, nodes) as comm:
        found = results(comm)
        total = comm.allreduce(np.full(70_000, comm.rank + 1.0))
        return comm.nodes, comm.leaders, total[-1], comm.mpi, found[0], found[5], found[10]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_work_and_agree_on_all_ranks(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    nodes = LAYOUTS[layout]
    size = len(nodes)
    found = ranks.run(do_collectives, str(tmp_path), nodes, on=range(size))
    least = min(nodes.count(node) for node in nodes)
    leaders = least if max(nodes) > 0 else 0
    for each in found:
        assert each[:4] == (nodes, leaders, size * (size + 1) / 2, None)
        assert each[4:] == found[0][4:]
    rows = [np.random.default_rng(COUNTS[2] + k).standard_normal(COUNTS[2]) for k in range(size)]
    close = np.sum(np.array(rows, np.float32), axis=0, dtype=np.float64)
    assert np.allclose(np.frombuffer(found[0][6], np.float32), close, atol=1e-5)


def do_ports(seat: Seat, folder: str, ports: str) -> tuple[set[int], str]:
    """The ports of this rank's connections, to leaders and of a window, or an error."""
    config = dataclasses.replace(PATIENT, ports=ports)
    try:
        with meet(seat, folder, [0, 1], config) as comm:
            window = NotifiedWindow(comm, 1 << 16, 2, network="sockets")
            comm.barrier()
            found = {address[1] for address, _ in tcp_sockets()}
            comm.barrier()
            window.close()
            return found, ""
    except HsgdError as error:
        return set(), str(error)


def test_ranks_listen_in_the_range_of_ports_of_a_setting(ranks: Ranks, tmp_path: Path) -> None:
    first = 23_000 + os.getpid() % 5000
    found = ranks.run(do_ports, str(tmp_path), f"{first}-{first + 9}", on=range(2))
    assert [error for _, error in found] == ["", ""]
    # Of the two ends of a connection one is at the port where somebody listened.
    listening = [ports & set(range(first, first + 10)) for ports, _ in found]
    assert len(listening[0] | listening[1]) >= 2, found


def test_a_range_without_a_free_port_is_an_error_with_the_remedy(
    ranks: Ranks, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        for _, error in ranks.run(do_ports, str(tmp_path), f"{port}-{port}", on=range(2)):
            assert f"no port of {port}-{port} is free" in error and "HSGD_PORTS" in error


def do_collectives_near(seat: Seat, folder: str, nics: list[int]) -> tuple[list[Any], bool]:
    config = dataclasses.replace(PATIENT, near_nic=nics[seat.rank])
    with meet(seat, folder, [0, 0, 0, 1], config) as comm, comm.split(0) as part:
        assert part is not None
        return results(part), part.metrics().inter_bytes_sent > 0


@pytest.mark.long
def test_the_rank_near_the_adapter_carries_what_goes_between_nodes(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = {}
    for nics in ([0, 0, 0, 0], [0, 0, 1, 0], [0, 2, 1, 1]):
        folder = tmp_path / str(nics)
        folder.mkdir()
        rows = ranks.run(do_collectives_near, str(folder), nics)
        found[str(nics)] = [row for row, _ in rows]
        carries = 2 if 1 in nics[:3] else 0
        assert [sends for _, sends in rows] == [rank in (carries, 3) for rank in range(4)]
    assert len({repr(one) for one in found.values()}) == 1  # who carries changes no bit


def do_split(seat: Seat, folder: str) -> list[Any]:
    found: list[Any] = []
    with meet(seat, folder, [0, 0, 1, 1]) as comm:
        for color, key in ((0, -seat.rank), (seat.rank // 2, 0), (seat.rank % 2, 0)):
            part = comm.split(color, key)
            assert part is not None
            with part:
                total = part.allreduce(np.full(70_000, seat.rank + 1.0))[-1]
                leaf = part.split(0 if part.rank == 0 else None)
                assert (leaf is not None) == (part.rank == 0)
                if leaf is not None:
                    leaf.close()
                found.append((part.rank, part.size, part.cross_size, total))
    return found


def test_parts_span_the_nodes_of_their_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for rank, (whole, node, lane) in enumerate(ranks.run(do_split, str(tmp_path))):
        assert whole == (3 - rank, 4, 2, 10.0)
        assert node == (rank % 2, 2, 1, 3.0 if rank < 2 else 7.0)
        assert lane == (rank // 2, 2, 2, 4.0 if rank % 2 == 0 else 6.0)


def do_find(seat: Seat, folder: str) -> list[int]:
    with meet(seat, folder, None) as comm:
        return comm.nodes


def test_ranks_that_share_a_machine_are_one_node(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(do_find, str(tmp_path)) == [[0] * 4] * 4


def do_meet_again(seat: Seat, folder: str) -> float:
    for _ in range(3):
        with meet(seat, folder, [0, 1]) as comm:
            total = float(comm.allreduce(np.ones(10))[0])
    return total


def test_meetings_under_one_prefix_follow_one_another(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(do_meet_again, str(tmp_path), on=range(2)) == [2.0, 2.0]


def do_until_lost(
    seat: Seat, folder: str, nodes: list[int], config: Config = PATIENT
) -> tuple[str, float]:
    comm = meet(seat, folder, nodes, config)
    seat.tell("ready")
    seat.pipe.recv()
    try:
        for _ in range(10**6):
            comm.allreduce(np.ones(50_000))
    except HsgdError as error:
        return f"{type(error).__name__} about {error.rank}: {error}", time.monotonic()
    finally:
        comm.close()
    return "nothing happened", 0.0


@pytest.mark.parametrize("layout", ["1+1", "2+2", "2+1+1"])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_killed_rank_is_named_on_all_nodes(tmp_path: Path, layout: str, victim: str) -> None:
    nodes = LAYOUTS[layout]
    killed = 0 if victim == "first" else len(nodes) - 1
    with Ranks(len(nodes)) as pool:
        pool.start(do_until_lost, str(tmp_path), nodes)
        for rank in range(len(nodes)):
            assert pool.hear(rank) == "ready"
        for rank in range(len(nodes)):
            pool.send(rank, "go")
        select.select([], [], [], 0.05)  # some collectives into the loop; any moment will do
        fell = time.monotonic()
        pool.signal(killed, signal.SIGKILL)
        for outcome in pool.finish(on=set(range(len(nodes))) - {killed}):
            assert outcome.error is None, outcome.trace
            line, when = outcome.value
            assert line.startswith(f"PeerLost about {killed}: "), line
            assert f"rank {killed} " in line
            assert when - fell < DETECTED_S


@pytest.mark.long
@pytest.mark.parametrize(("layout", "stopped"), [("1+1", 0), ("2+1", 0), ("2+1", 1), ("2+1", 2)])
def test_a_stopped_rank_is_named_on_all_nodes(tmp_path: Path, layout: str, stopped: int) -> None:
    """Deadlines pass on all nodes at about the same time, but only one knows whose fault it is: it
    is heard. Of a node with one rank that rank is named, whoever says so.
    """
    nodes = LAYOUTS[layout]
    with Ranks(len(nodes)) as pool:
        pool.start(do_until_lost, str(tmp_path), nodes, Config(timeout_s=4.0))
        for rank in range(len(nodes)):
            assert pool.hear(rank) == "ready"
        pool.signal(stopped, signal.SIGSTOP)
        others = set(range(len(nodes))) - {stopped}
        for rank in others:
            pool.send(rank, "go")
        for outcome in pool.finish(on=others):
            assert outcome.error is None, outcome.trace
            line, _ = outcome.value
            assert line.startswith(f"CollectiveTimeout about {stopped}: "), line
        pool.signal(stopped, signal.SIGCONT)


def do_meet_wrongly(seat: Seat, folder: str, size: list[int], config: list[Config]) -> None:
    meet(seat, folder, [0, 1], config[seat.rank], size=size[seat.rank]).close()


BRIEF = Config(timeout_s=0.5)
WRONG: dict[str, tuple[list[int], list[Config], type[Exception], str]] = {
    "sizes": ([2, 3], [PATIENT] * 2, ValueError, "rank 0 has size 2, rank 1 has size 3"),
    "settings": (
        [2, 2],
        [PATIENT, Config(timeout_s=30.0, slots=5)],
        ValueError,
        "have different settings (slots)",
    ),
    "interface": (
        [2, 2],
        [PATIENT, Config(timeout_s=30.0, interfaces="nosuch0")],
        ValueError,
        'no interface "nosuch0" is up with an address on this host; it has: ',
    ),
}


@pytest.mark.parametrize("what", ["sizes", "settings", "interface"])
def test_ranks_that_do_not_fit_together_all_get_the_same_line(
    ranks: Ranks, tmp_path: Path, what: str
) -> None:
    sizes, configs, kind, line = WRONG[what]
    outcomes = ranks.outcomes(do_meet_wrongly, str(tmp_path), sizes, configs, on=range(2))
    for outcome in outcomes:
        assert isinstance(outcome.error, kind) and line in str(outcome.error), outcome.trace


class SilentStore:
    """A store whose process no longer answers, as when the link to its host is cut."""

    def __init__(self, store: Any, answers: int) -> None:
        self._store, self._answers, self._over = store, answers, threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self._answers -= 1
            if self._answers < 0:
                self._over.wait(60)
            return getattr(self._store, name)(*arguments)

        return ask


@pytest.mark.parametrize("answers", range(4))
def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path, answers: int) -> None:
    from torch.distributed import FileStore

    store = SilentStore(FileStore(str(tmp_path / "store"), 2), answers)
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"store in which ranks meet did not answer") as got:
        Comm.over_store(store, 0, 2, config=Config(timeout_s=0.5))
    assert got.value.rank == -1
    assert time.monotonic() - begin < 0.5 + 0.5 + DETECTED_S


def test_a_rank_that_does_not_come_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(do_meet_wrongly, str(tmp_path), [3] * 2, [BRIEF] * 2, on=[0, 1]):
        assert isinstance(outcome.error, CollectiveTimeout), outcome.trace
        assert "Comm.over_store: rank 2 did not join within 0.5 s" in str(outcome.error)
    (alone,) = ranks.outcomes(do_meet_wrongly, str(tmp_path), [3] * 2, [BRIEF] * 2, on=[1])
    assert "rank 0, 2 did not join within 0.5 s" in str(alone.error)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_wrong_rank_is_refused_before_the_store_is_used(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {size}: give a size of at least 1"):
        Comm.over_store(None, rank, size)


def do_fork(seat: Seat, folder: str) -> tuple[int, int, str]:
    """TCP connections of this rank and of its child, and what a collective says to the child."""
    with meet(seat, folder, [0, 1]) as comm:
        (_, line), of_child = in_forked_child(lambda: (told_by(comm.barrier), len(tcp_sockets())))
        comm.allreduce(np.ones(100_000))  # the child has ended nothing here
        own = len(tcp_sockets())
        comm.barrier()
    return own, of_child, line


def test_a_forked_child_leaves_the_connections(ranks: Ranks, tmp_path: Path) -> None:
    for own, of_child, line in ranks.run(do_fork, str(tmp_path), on=range(2)):
        assert own >= 10 and of_child == 0
        assert "belongs to process" in line


def do_without_descriptors(seat: Seat, folder: str) -> None:
    with few_descriptors(30) if seat.rank == 1 else contextlib.nullcontext():
        meet(seat, folder, [0, 1]).close()


def test_missing_descriptors_are_told_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in ranks.outcomes(do_without_descriptors, str(tmp_path), on=range(2)):
        assert isinstance(outcome.error, HsgdError), outcome.trace
        assert "set-up: 42 file descriptors are needed and " in str(outcome.error)


def do_shrink(seat: Seat, folder: str) -> str:
    with meet(seat, folder, [0, 1]) as comm, pytest.raises(ValueError, match="nodes") as raised:
        comm.shrink(1.0)
    return str(raised.value)


def test_shrink_over_several_nodes_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks.run(do_shrink, str(tmp_path), on=range(2)))


def program(folder: str) -> None:
    """One rank under mpirun on virtual nodes: the same bits over MPI and over TCP."""
    from mpi4py import MPI
    from torch.distributed import FileStore

    world = MPI.COMM_WORLD
    names = {"HSGD_INTERFACES": "eth0", "HSGD_NEAR_NIC": "1" if world.rank == 1 else "0"}
    config = Config.from_env({**os.environ, **names})
    store = FileStore(f"{folder}/store", world.size)
    with (
        Comm(world, config) as over_mpi,
        Comm.over_store(store, world.rank, world.size, config=config) as over_tcp,
    ):
        same = results(over_mpi) == results(over_tcp) and over_mpi.nodes == over_tcp.nodes
        sends = [comm.metrics().inter_bytes_sent > 0 for comm in (over_mpi, over_tcp)]
        all_same = world.allreduce(same, MPI.LAND)
        report = {
            "same": all_same,
            "nodes": over_tcp.nodes,
            "mpi": over_tcp.mpi is not None,
            "sends": world.allgather(sends),
        }
        if world.rank == 0:
            print(json.dumps(report))


@pytest.mark.parametrize("counts", [(2, 2), (2, 1, 1)], ids=str)
def test_results_between_virtual_nodes_are_the_bits_of_mpi(
    tmp_path: Path, cluster: Callable[..., Cluster], counts: tuple[int, ...]
) -> None:
    hosts = ",".join(f"node{k}:{count}" for k, count in enumerate(counts, 1))
    done = cluster(len(counts)).mpirun(
        sum(counts), [sys.executable, __file__, str(tmp_path)], hosts=hosts, timeout_s=JOB_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    sends = [min(counts) > 1, True, True, True]  # over MPI and over TCP
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "same": True,
        "nodes": nodes,
        "mpi": False,
        "sends": [[each, each] for each in sends],
    }


if __name__ == "__main__":
    program(sys.argv[1])
