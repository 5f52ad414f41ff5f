"""Comm over MPI, on one node and between nodes: one result, honest counters, an end to faults.

Run under mpirun, this file is the program of the ranks: `python test_comm_mpi.py CASE`. One job per
layout of ranks runs all that should succeed; the tests look at what it reports.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from block_programs import wrong_results
from parts import Choice, split_and_check, together
from reference import DTYPES, allreduced, as_torch, digest, made
from tiers import short_form
from toolkit.cluster import Cluster

__all__: list[str] = []

COUNTED_BYTES = 32 << 20
SMALL_STEPS = {
    "HSGD_TIMEOUT_S": "60",
    "HSGD_WIRE_CHUNK_BYTES": "65536",
    "HSGD_ONESHOT_BYTES": "512",
    "HSGD_WIRE_ONESHOT_BYTES": "512",
}
JOB_S = 150.0


@dataclass(frozen=True)
class Layout:
    """How many ranks each node has; one number is this machine itself."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.ranks))

    @property
    def size(self) -> int:
        return sum(self.ranks)

    @property
    def hosts(self) -> str:
        return ",".join(f"node{k + 1}:{count}" for k, count in enumerate(self.ranks))


LOCAL = [Layout((count,)) for count in (1, 2, 3, 4)]
NODES = [Layout(ranks) for ranks in ((2, 2), (2, 1), (1, 1, 1), (2, 2, 2), (1, 1, 1, 1))]
SHORT, LONG = {LOCAL[2], NODES[1]}, {NODES[0]}  # one job each
NARROW = {"HSGD_WIRE_DTYPE": "bfloat16"}
Job = Callable[..., subprocess.CompletedProcess[str]]


def wide(layouts: list[Layout]) -> list[Any]:
    """Cases for parametrize: `make test` takes those of SHORT, `make test-long` those of LONG."""
    near = [layout for layout in layouts if layout in SHORT | LONG]
    keep = [number for number, layout in enumerate(near) if layout in SHORT]
    rest = [layout for layout in layouts if layout not in near]
    return [*short_form("long", near, keep), *short_form("chaos", rest, ())]


@pytest.fixture
def job(mpirun: Job, request: pytest.FixtureRequest) -> Job:
    """job(layout, case, env): the ranks of a layout run a case of this file."""

    def run(
        layout: Layout, case: str, env: dict[str, str] | None = None, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        env = SMALL_STEPS | (env or {})
        if len(layout.ranks) == 1:
            return mpirun(layout.size, __file__, case, env=env, timeout_s=JOB_S)
        nodes: Cluster = request.getfixturevalue("cluster")(len(layout.ranks))
        argv = [sys.executable, __file__, case]
        return nodes.mpirun(
            layout.size, argv, hosts=layout.hosts, env=env, options=options, timeout_s=JOB_S
        )

    return run


_reports: dict[Layout, dict[str, Any]] = {}


@pytest.fixture
def report(job: Job, request: pytest.FixtureRequest) -> Callable[[Layout], dict[str, Any]]:
    """What rank 0 reports of a layout's job, and what the interfaces of its nodes counted."""

    def get(layout: Layout) -> dict[str, Any]:
        if layout not in _reports:
            nodes = len(layout.ranks)
            counted = request.getfixturevalue("cluster")(nodes) if nodes > 1 else None
            done = job(layout, "everything")
            assert done.returncode == 0, done.stderr[-4000:]
            _reports[layout] = json.loads(done.stdout.splitlines()[-1])
            if counted is not None:
                for name, case, env in (
                    ("interfaces", "count", {}),
                    ("narrow interfaces", "count", NARROW),
                    ("interfaces of blocks", "count blocks", {}),
                ):
                    before = counted.interface_bytes()
                    assert job(layout, case, env).returncode == 0
                    after = counted.interface_bytes()
                    sent = {node: after[node][0] - before[node][0] for node in after}
                    _reports[layout][name] = sent
        return _reports[layout]

    return get


@pytest.mark.long
@pytest.mark.parametrize("layout", wide(LOCAL + NODES), ids=str)
def test_allreduce_equals_numpy_in_the_promised_order_on_all_ranks(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    assert report(layout)["wrong allreduces"] == []


@pytest.mark.long
@pytest.mark.parametrize("layout", wide([LOCAL[1], *NODES]), ids=str)
def test_16_bit_floats_between_nodes_round_each_nodes_sum_and_the_result(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    assert report(layout)["wrong narrow allreduces"] == []


@pytest.mark.parametrize("layout", wide(LOCAL + NODES), ids=str)
def test_every_rank_gets_its_rows_however_ranks_are_numbered(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    assert report(layout)["wrong blocks"] == []


@pytest.mark.parametrize("layout", wide(LOCAL + NODES), ids=str)
def test_broadcast_gives_all_nodes_the_bits_of_each_root(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    assert report(layout)["wrong broadcasts"] == []


@pytest.mark.parametrize("layout", wide(LOCAL + NODES), ids=str)
def test_every_rank_knows_its_place(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    places = [
        {
            "rank": sum(layout.ranks[:node]) + local,
            "size": layout.size,
            "local_rank": local,
            "local_size": count,
            "cross_rank": node,
            "cross_size": len(layout.ranks),
        }
        for node, count in enumerate(layout.ranks)
        for local in range(count)
    ]
    facts = report(layout)
    assert facts["places of Comm()"] == places
    assert facts["places of hsgd.init()"] == places


@pytest.mark.parametrize("layout", wide([*LOCAL[1:], *NODES]), ids=str)
def test_ranks_that_call_differently_are_told_alike_on_all_nodes(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    for case, lines in report(layout)["mismatches"].items():
        assert len(set(lines)) == 1, f"{case}: {lines}"
        assert f"rank {layout.size - 1} " in lines[0] and lines[0].count("rank ") >= 2, lines[0]


@pytest.mark.parametrize("layout", wide([*LOCAL[1:], *NODES]), ids=str)
def test_the_parts_of_a_split_communicator_work_at_once(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    facts = report(layout)
    expected = [sum(range(rank % 2, layout.size, 2)) for rank in range(layout.size)]
    assert facts["sums of split"] == expected
    assert facts["sums of reversed"] == [sum(range(layout.size))] * layout.size


@pytest.mark.parametrize("layout", wide(LOCAL + NODES), ids=str)
def test_splits_of_splits_have_the_ranks_of_mpi_and_work_with_their_parents_at_once(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    assert report(layout)["wrong splits"] == []


@pytest.mark.long
@pytest.mark.parametrize("layout", [LOCAL[1], NODES[1]], ids=str)
def test_asynchronous_calls_need_mpi_for_many_threads_only_between_nodes(
    job: Job, layout: Layout
) -> None:
    done = job(layout, "serialized")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("async: ")]
    refused = "HsgdError asynchronous collectives between nodes: MPI was initialized for less than"
    expected = "async: done" if len(layout.ranks) == 1 else f"async: {refused}"
    assert len(lines) == layout.size and all(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize("layout", [LOCAL[1], NODES[1]], ids=str)
def test_mpi_ends_well_with_open_handles(job: Job, layout: Layout) -> None:
    done = job(layout, "open end")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("layout", wide(NODES), ids=str)
def test_a_node_sends_what_direct_exchange_needs_and_no_more(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    facts, nodes = report(layout), len(layout.ranks)
    least = 2 * (nodes - 1) / nodes * COUNTED_BYTES
    for counter in ("sent", "received"):
        assert facts[counter] == pytest.approx([least] * nodes, rel=0.01)
    for node, interface_bytes in facts["interfaces"].items():
        assert interface_bytes == pytest.approx(least, rel=0.05), node


@pytest.mark.parametrize("layout", wide(NODES), ids=str)
def test_each_row_crosses_a_link_once_for_each_node_that_needs_it(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    for node, interface_bytes in report(layout)["interfaces of blocks"].items():
        here = layout.ranks[int(node.removeprefix("node")) - 1]
        elsewhere = layout.size - here
        scattered, exchanged = elsewhere, here * elsewhere
        gathered = here * (len(layout.ranks) - 1)
        blocks = scattered + gathered + exchanged
        least = blocks * (COUNTED_BYTES // 8 // layout.size * 8)
        assert interface_bytes == pytest.approx(least, rel=0.05), node


@pytest.mark.parametrize("layout", wide(NODES), ids=str)
def test_16_bit_floats_between_nodes_halve_the_bytes_on_the_link(
    report: Callable[[Layout], dict[str, Any]], layout: Layout
) -> None:
    nodes = len(layout.ranks)
    least = (nodes - 1) / nodes * COUNTED_BYTES
    for node, interface_bytes in report(layout)["narrow interfaces"].items():
        assert interface_bytes == pytest.approx(least, rel=0.05), node


@pytest.mark.parametrize(
    "variable",
    [
        "HSGD_ONESHOT_BYTES",
        "HSGD_WIRE_ONESHOT_BYTES",
        "HSGD_WIRE_CHUNK_BYTES",
        "HSGD_WIRE_DTYPE",
        "HSGD_SLOTS",
    ],
)
@pytest.mark.parametrize("layout", [LOCAL[1], NODES[0]], ids=str)
def test_different_settings_are_refused_on_all_ranks_of_all_nodes(
    job: Job, layout: Layout, variable: str
) -> None:
    done = job(layout, f"settings {variable}")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if "different HSGD_* settings" in line]
    assert len(lines) == layout.size


@pytest.mark.parametrize("layout", NODES[:2], ids=str)
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_job_of_which_a_rank_is_killed_ends_with_a_message(
    job: Job, layout: Layout, victim: str
) -> None:
    rank = 0 if victim == "first" else layout.size - 1
    done = job(layout, f"kill {rank}")
    assert done.returncode != 0
    # hsgd, the launcher and Open MPI's transport, which sees a connection end, race to tell it.
    result = done.stdout + done.stderr
    assert any(words in result for words in ("died", "signal 9", "Socket closed")), result


@pytest.mark.parametrize("layout", [NODES[0], NODES[2]], ids=str)
def test_the_death_of_a_rank_is_told_to_the_other_nodes_and_all_go_on(
    job: Job, layout: Layout
) -> None:
    """With a launcher that lets the others live, they name the cause themselves."""
    rank = layout.size - 1
    done = job(layout, f"survive {rank}", options=("--with-ft", "ulfm"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert len(lines) == layout.size - 1, done.stdout + done.stderr[-3000:]
    for line in lines:
        assert line.startswith(f"told PeerLost about {rank}: ") and f"rank {rank} " in line, line
    left = sorted(line for line in done.stdout.splitlines() if line.startswith("went on "))
    assert left == [f"went on {place} of {rank}" for place in range(rank)]


# --- the program of the ranks ---


def run_results(world: Any, comm: Any) -> list[str]:
    """All dtypes, ops and regimes; a line for each result that differs from NumPy's."""
    places = world.allgather((comm.cross_rank, comm.local_rank, comm.rank))
    by_node: dict[int, list[int]] = {}
    for node, _, rank in sorted(places):
        by_node.setdefault(node, []).append(rank)
    wrong = []
    for case, dtype in enumerate(DTYPES):
        if dtype == "bfloat16" and (comm.size, comm.cross_size) != (4, 2):
            continue  # it needs torch, which takes seconds to load
        ops = ("sum", "mean", "max", "prod") if "float" in dtype else ("sum", "min")
        for op in ops:
            for count in (0, 1, 127, 1021, 10_007, *((65_537, 200_003) if op == "sum" else ())):
                seed = case * 1000 + count % 997
                inputs = {
                    rank: made(seed, rank, count, dtype, op == "max") for rank in range(comm.size)
                }
                data = inputs[comm.rank].copy()
                array = as_torch(data, dtype) if dtype == "bfloat16" else data
                comm.allreduce(array, op, out=array, name=f"{dtype} {op} {count}")
                ordered = [[inputs[rank] for rank in ranks] for ranks in by_node.values()]
                if digest(data) != digest(allreduced(ordered, dtype, op)):
                    wrong.append(f"{dtype} {op} {count} on rank {comm.rank}")
    return wrong


def run_blocks(world: Any) -> list[str]:
    """reduce_scatter, allgather and alltoall, with ranks numbered node by node and across."""
    from hsgd import Comm

    wrong = []
    with Comm() as comm:
        dealt = world.Split(0, comm.local_rank * comm.size + comm.cross_rank)
    for ranks in (world, dealt):
        with Comm(ranks) as comm:
            places = ranks.allgather((comm.cross_rank, comm.local_rank, comm.rank))
            nodes: list[list[int]] = [[] for _ in range(comm.cross_size)]
            for node, _, rank in sorted(places):
                nodes[node].append(rank)
            if comm.nodes != [node for node, *_ in sorted(places, key=lambda place: place[2])]:
                wrong.append(f"nodes of ranks are {comm.nodes}")
            objects = comm.allgather_object({"rank": comm.rank, "more": "x" * comm.rank})
            if objects != [{"rank": rank, "more": "x" * rank} for rank in range(comm.size)]:
                wrong.append(f"objects are {objects}")
            dtypes = [dtype for dtype in DTYPES if dtype != "bfloat16"]  # it needs torch
            for later in (False, True):
                seed, calls = comm.size + 10 * later, 20 if later else 40
                wrong += wrong_results(comm, nodes, seed, calls, dtypes, 20_000, False, later)
    dealt.Free()
    return wrong


def run_narrow_results(world: Any) -> list[str]:
    """float32 and, which must stay exact, float64 with 16-bit floats between nodes."""
    from hsgd import Comm
    from hsgd.config import Config

    wrong = []
    for wire_dtype in ("bfloat16", "float16"):
        config = dataclasses.replace(Config.from_env(), wire_dtype=wire_dtype)
        with Comm(world, config=config) as comm:
            by_node: dict[int, list[int]] = {}
            for node, rank in sorted(world.allgather((comm.cross_rank, comm.rank))):
                by_node.setdefault(node, []).append(rank)
            for dtype in ("float32", "float64"):
                for case, op in enumerate(("sum", "mean", "min", "max", "prod")):
                    for count in (1, 64, 1021, 10_007, 200_003):
                        inputs = [
                            [made(case, rank, count, dtype, op != "mean") for rank in ranks]
                            for ranks in by_node.values()
                        ]
                        data = made(case, comm.rank, count, dtype, op != "mean")
                        comm.allreduce(data, op, out=data)
                        whole = data.nbytes <= config.wire_oneshot_bytes
                        expected = allreduced(inputs, dtype, op, "none" if whole else wire_dtype)
                        if digest(data) != digest(expected):
                            wrong.append(f"{wire_dtype} {dtype} {op} {count} on rank {comm.rank}")
                        data = made(case, comm.rank, count, dtype, op != "mean")
                        rows = np.array_split(expected, comm.size)[comm.rank]
                        if digest(comm.reduce_scatter(data, op)) != digest(rows):
                            wrong.append(f"rows of {wire_dtype} {dtype} {op} {count}")
    return wrong


def run_broadcasts(comm: Any) -> list[str]:
    wrong = []
    for root in range(comm.size):
        for count in (0, 1, 500, 513, 70_001, 300_000):
            data = made(count, comm.rank, count, "float64")
            comm.broadcast(data, root=root)
            if digest(data) != digest(made(count, root, count, "float64")):
                wrong.append(f"{count} from {root} on rank {comm.rank}")
        comm.barrier()
    return wrong


def run_mismatches(comm: Any) -> dict[str, str]:
    """What this rank is told when the last one calls something else; its buffer is not touched."""
    from hsgd import SignatureMismatch

    last = comm.rank == comm.size - 1
    cases = {
        "count": lambda data: comm.allreduce(data[: 12 if last else 10]),
        "dtype": lambda data: comm.allreduce(
            data.view("int64") if last else data, out=data.view("int64") if last else data
        ),
        "op": lambda data: comm.allreduce(data, "max" if last else "sum", out=data),
        "kind": lambda data: comm.barrier() if last else comm.allreduce(data, out=data),
        "root": lambda data: comm.broadcast(data[:10], root=int(last)),
        "regime": lambda data: comm.allreduce(
            data if last else data[:10], out=data if last else data[:10]
        ),
        "name": lambda data: comm.allreduce(data, out=data, name="a" if last else "b"),
    }
    result = {}
    for case, call in cases.items():
        data = np.full(300_000, comm.rank + 1.0)
        try:
            call(data)
            result[case] = "no error"
        except SignatureMismatch as error:
            result[case] = str(error)
        assert (data == comm.rank + 1.0).all(), f"{case}: the buffer was touched"
        for count in (5, 100_000):
            assert (comm.allreduce(np.ones(count)) == comm.size).all(), f"{case}: broken afterwards"
    return result


def place_of(owner: Any) -> dict[str, int]:
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    values = {name: getattr(owner, name) for name in names}
    return {name: value() if callable(value) else value for name, value in values.items()}


def run_split(world: Any) -> tuple[float, float]:
    """Two disjoint halves at once, then all ranks in reversed order."""
    from hsgd import Comm

    half = world.Split(world.rank % 2, world.rank)
    with Comm(half) as comm:
        part = comm.allreduce(np.full(50_000, float(world.rank)))
    backwards = world.Split(0, -world.rank)
    with Comm(backwards) as comm:
        assert comm.rank == world.size - 1 - world.rank
        everybody = comm.allreduce(np.full(50_000, float(world.rank)))
        data = np.full(3, float(world.rank))
        comm.broadcast(data, root=0)
        assert data[0] == world.size - 1
    half.Free()
    backwards.Free()
    assert part.min() == part.max() and everybody.min() == everybody.max()
    return float(part[0]), float(everybody[0])


def run_splits(world: Any, comm: Any) -> list[str]:
    """Odd colors and keys, parts of parts, and all communicators of a rank at once."""
    from hsgd import SignatureMismatch

    size, wrong = comm.size, []
    tables: list[list[Choice]] = [
        [(rank % 2, 0) for rank in range(size)],
        [(7, -rank) for rank in range(size)],
        [(None if rank == size - 1 else 2**31 - 1, 3) for rank in range(size)],
        [(rank, 0) for rank in range(size)],
        [(-1 if rank == 0 else rank // 3, rank % 2) for rank in range(size)],
    ]
    for table in tables:
        part, result = split_and_check(comm, table)
        leaf = None
        if part is not None:
            leaf, more = split_and_check(part, [(rank % 2, -rank) for rank in range(part.size)])
            result += more
        comms = {0: comm, 1: part, 2: leaf}
        wrong += result + together({mark: each for mark, each in comms.items() if each}, 10)
        for each in (leaf, part):
            if each is not None:
                each.close()
    if size > 1:
        try:
            comm.barrier() if comm.rank == 0 else comm.split(0)
            wrong.append("a barrier was taken for a split")
        except SignatureMismatch:
            pass
    mine = world.Dup()
    with type(comm)(mine) as over:
        mine.Free()
        if over.cross_size > 1:
            try:
                over.split(0)
                wrong.append("a freed communicator was split")
            except ValueError as error:
                wrong += [] if "freed" in str(error) else [str(error)]
    return wrong


def run_serialized(world: Any) -> None:
    from hsgd import Comm, HsgdError

    with Comm() as comm:
        try:
            comm.allreduce_async(np.ones(1000)).wait()
            print("async: done", flush=True)
        except HsgdError as error:
            print(f"async: {type(error).__name__} {error}", flush=True)
        assert comm.allreduce(np.ones(1000))[0] == comm.size


def run_open_end(world: Any) -> None:
    """The program ends; its last results are still needed by others, or by nobody."""
    from hsgd import Comm

    comm = Comm()
    part = comm.split(world.rank % 2)
    assert part is not None
    for each in (comm, part):
        for count in (3, 200_000):
            each.allreduce_async(np.ones(count))


def run_everything(world: Any) -> None:
    import hsgd

    facts: dict[str, Any] = {}
    with hsgd.Comm() as comm:
        result = run_mismatches(comm) if comm.size > 1 else {}
        wrong_splits = world.gather(run_splits(world, comm))
        gathered = world.gather((run_results(world, comm), run_broadcasts(comm), result))
        blocks = world.gather(run_blocks(world))
        facts["places of Comm()"] = world.gather(place_of(comm))
    if gathered and wrong_splits:
        facts["wrong splits"] = [line for each in wrong_splits for line in each]
        facts["wrong allreduces"] = [line for each in gathered for line in each[0]]
        facts["wrong blocks"] = [line for each in blocks or [] for line in each]
        facts["wrong broadcasts"] = [line for each in gathered for line in each[1]]
        facts["mismatches"] = {
            case: [each[2][case] for each in gathered] for case in gathered[0][2]
        }
    narrow = world.gather(run_narrow_results(world))
    if narrow:
        facts["wrong narrow allreduces"] = [line for lines in narrow for line in lines]
    hsgd.init()
    hsgd.init()
    facts["places of hsgd.init()"] = world.gather(place_of(hsgd))
    hsgd.shutdown()
    assert not hsgd.is_initialized()
    sums = world.gather(run_split(world))
    if sums:
        facts["sums of split"], facts["sums of reversed"] = [
            list(pair) for pair in zip(*sums, strict=True)
        ]
    with hsgd.Comm() as comm:
        before = comm.metrics()
        comm.allreduce(np.ones(COUNTED_BYTES // 8))
        after = comm.metrics()
        moved = (
            comm.cross_rank,
            after.inter_bytes_sent - before.inter_bytes_sent,
            after.inter_bytes_received - before.inter_bytes_received,
        )
        nodes = range(comm.cross_size)
    for index, name in ((1, "sent"), (2, "received")):
        of_ranks = world.gather(moved)
        if of_ranks:
            facts[name] = [
                sum(each[index] for each in of_ranks if each[0] == node) for node in nodes
            ]
    if world.rank == 0:
        print(json.dumps(facts), flush=True)


def run_count(world: Any) -> None:
    """One large allreduce and as little else as possible, for the counters of the interfaces."""
    from hsgd import Comm

    with Comm() as comm:
        comm.allreduce(np.ones(COUNTED_BYTES // 4, "float32"))


def run_count_blocks(world: Any) -> None:
    """As run_count, for the collectives whose ranks have different parts."""
    from hsgd import Comm

    with Comm() as comm:
        rows = COUNTED_BYTES // 8 // comm.size
        whole = np.ones(rows * comm.size)
        comm.reduce_scatter(whole)
        comm.allgather(whole[:rows])
        comm.alltoall(whole)


def run_settings(world: Any, variable: str) -> None:
    """The last rank has another value; whoever is refused says so."""
    from hsgd import Comm

    if world.rank == world.size - 1:
        other = {"HSGD_SLOTS": "5", "HSGD_WIRE_DTYPE": "float16"}
        os.environ[variable] = other.get(variable, "131072")
    try:
        Comm()
    except ValueError as error:
        print(f"rank {world.rank}: {error}", flush=True)


def run_kill(world: Any, victim: int, survive: bool) -> None:
    from hsgd import Comm, HsgdError

    comm = Comm()
    data = np.zeros(1_000_000)
    comm.barrier()
    try:
        for turn in range(1_000_000):
            if turn == 3 and world.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.allreduce(data, out=data)
    except HsgdError as error:
        print(f"told {type(error).__name__} about {error.rank}: {error}", flush=True)
        if survive:
            with pytest.raises(ValueError, match="the ranks span"):
                comm.shrink()
            comm = Comm(world.Shrink())
            assert (comm.allreduce(data[:70_000]) == comm.size * data[:70_000]).all()
            print(f"went on {comm.rank} of {comm.size}", flush=True)
            time.sleep(3)  # the launcher's own time to end the rest; others report meanwhile
            os._exit(0)
        raise


def main() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "serialized" if "serialized" in sys.argv else "multiple"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    case, _, value = " ".join(sys.argv[1:]).partition(" ")
    if case == "everything":
        run_everything(world)
    elif case == "count" and value == "blocks":
        run_count_blocks(world)
    elif case == "count":
        run_count(world)
    elif case == "serialized":
        run_serialized(world)
    elif case == "open":
        run_open_end(world)
    elif case == "settings":
        run_settings(world, value)
    else:
        run_kill(world, int(value), case == "survive")


if __name__ == "__main__":
    main()
