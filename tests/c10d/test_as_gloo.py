"""HSGD_AS_GLOO=1: groups that a program makes over gloo are hsgd's, and look as they did."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from backend_programs import (
    LIMIT,
    group,
    made,
    not_in_torch_2_7,
    register_standin,
    run_collectives,
    run_what_gloo_has,
)
from gloo_reference import over_gloo
from hsgd.c10d import as_gloo
from hsgd.c10d.gloo_group import GlooGroup
from hsgd.errors import LaunchError
from ranks import Ranks, Seat
from site_copy import installed_environ
from toolkit.processes import run_marked

__all__: list[str] = []

MOST_RANKS = 3
JOB_S = 120.0
c10d = dist.distributed_c10d


@contextlib.contextmanager
def served(report: str = "0") -> Iterator[None]:
    """torch as the start-up hook leaves it, and as it was afterwards."""
    before = c10d._new_process_group_helper
    with mock.patch.dict(os.environ, HSGD_REPORT=report):
        as_gloo.install(c10d)
    try:
        yield
    finally:
        c10d._new_process_group_helper = before


def do_collectives(seat: Seat, path: str, size: int) -> dict[str, list[Any]]:
    with served(), group(seat.rank, size, path, "gloo") as whole:
        assert type(whole) is GlooGroup
        return run_collectives(seat.rank, size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_gives_what_gloo_gives(ranks: Ranks, path: str, size: int) -> None:
    found = ranks.run(do_collectives, path, size, on=range(size))
    expected = over_gloo(size, f"{path}-gloo", run_what_gloo_has)
    for mine, gloos in zip(found, expected, strict=True):
        assert {name: mine[name] for name in gloos} == gloos


FORMS: tuple[Any, ...] = (
    "gloo",
    "GLOO",
    "cpu:gloo,meta:standin",
    "meta:standin,cpu:gloo",
    "cpu:gloo",
    None,
)


def do_look(seat: Seat, path: str) -> list[list[Any]]:
    """What a program may ask of its groups, for every way to ask for gloo."""
    register_standin()
    seen = []
    cpu = torch.device("cpu")
    for number, form in enumerate(FORMS):
        store = dist.FileStore(f"{path}-{number}", 2)
        dist.init_process_group(form, store=store, rank=seat.rank, world_size=2, timeout=LIMIT)
        whole: Any = dist.group.WORLD
        mesh = dist.init_device_mesh("cpu", (2, 1))
        part = dist.new_group([1, 0], timeout=LIMIT)
        groups = [whole, part, *mesh.get_all_groups()]
        tensor = made(seat.rank, 4)
        for each in groups:
            dist.all_reduce(torch.ones(1), group=each)
        dist.all_reduce(tensor, group=c10d._resolve_process_group(whole.group_name))
        if dist.get_backend() == "gloo":  # torch refuses it for others
            dist.monitored_barrier()
        seen.append(
            [
                *{type(each).__name__ for each in groups},
                dist.get_backend(),
                type(whole._get_backend(cpu)).__name__,
                isinstance(whole, dist.ProcessGroup),
                sorted({device.type for device in whole._device_types}),
                torch.equal(tensor, made(0, 4) + made(1, 4)),
                (whole.group_desc, whole.get_group_store() is not None, whole.rank(), whole.size()),
                dist.get_process_group_ranks(part),
                sorted(c10d._world.pg_names.values()) == sorted(map(_name, c10d._world.pg_map)),
            ]
        )
        dist.destroy_process_group()
    return seen


def _name(group: Any) -> str:
    return str(group.group_name)


def do_look_served(seat: Seat, path: str) -> list[list[Any]]:
    with served():
        return do_look(seat, path)


@pytest.mark.long
@not_in_torch_2_7
def test_groups_look_as_those_of_gloo(ranks: Ranks, path: str) -> None:
    ours = ranks.run(do_look_served, path, on=range(2))
    theirs = ranks.run(do_look, f"{path}-plain", on=range(2))
    for mine, other in zip(ours, theirs, strict=True):
        for form, a, b in zip(FORMS, mine, other, strict=True):
            assert (a[0], b[0]) == ("GlooGroup", "ProcessGroup"), form
            assert a[1:] == b[1:], form


def do_call_directly(seat: Seat, path: str, is_served: bool) -> list[list[float]]:
    """Methods of a group with single tensors, op and root, as a program may call them."""
    rank, seen = seat.rank, []
    with served() if is_served else contextlib.nullcontext(), group(rank, 2, path, "gloo") as whole:
        both, one = [torch.zeros(2), torch.zeros(2)], torch.zeros(2)
        mine = torch.ones(2) * (rank + 1)
        wide = [torch.ones(2) * (rank + 1 + k) for k in range(2)]
        calls = {
            "max": lambda t: whole.allreduce(t, dist.ReduceOp.MAX),
            "op": lambda t: whole.allreduce([t], op=dist.ReduceOp.PRODUCT),
            "sum": lambda t: whole.allreduce(t),
            "root": lambda t: whole.broadcast(t, 1),
            "named": lambda t: whole.broadcast(t, root=1),
            "first": lambda t: whole.broadcast([t]),
            "reduce": lambda t: whole.reduce(t, 0),
            "gathered": lambda t: whole.allgather(both, t),
            "gather": lambda t: whole.gather(both if rank == 0 else [], t, 0),
            "scatter": lambda t: whole.scatter(one, wide if rank == 0 else [], 0),
            "alltoall": lambda t: whole.alltoall(both, wide),
            "limit": lambda t: whole.allreduce(t, dist.ReduceOp.SUM, LIMIT),
        }
        for name, call in calls.items():
            tensor = mine.clone()
            call(tensor).wait()
            if name == "reduce" and rank:  # gloo leaves parts of the sum there
                tensor.zero_()
            seen.append([*tensor.tolist(), *one.tolist(), *both[0].tolist(), *both[1].tolist()])
        whole.barrier(timeout=LIMIT).wait()
    return seen


@not_in_torch_2_7
def test_methods_take_the_forms_that_gloos_take(ranks: Ranks, path: str) -> None:
    ours = ranks.run(do_call_directly, path, True, on=range(2))
    assert ours == ranks.run(do_call_directly, f"{path}-plain", False, on=range(2))


def do_pretend(seat: Seat, path: str) -> list[Any]:
    """What torch.compile and memory estimates run on: tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with served(), group(seat.rank, 2, path, "gloo"), FakeTensorMode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(joined := torch.ones(6), tensor, async_op=True).wait()
        return [type(tensor).__name__, tuple(joined.shape)]


def test_fake_tensors_go_nowhere(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_pretend, path, on=range(2)) == [["FakeTensor", (6,)]] * 2


def do_left(seat: Seat, path: str) -> str:
    """Calls that are hsgd's and calls that are not, counted."""
    other, rank = 1 - seat.rank, seat.rank
    with served("1"), group(rank, 2, path, "gloo") as whole:
        requests = [dist.isend(made(rank, 5), other)]
        dist.recv(place := torch.zeros(5), other)
        requests[0].wait()
        assert torch.equal(place, made(other, 5))
        dist.all_reduce(torch.ones(10))
        dist.monitored_barrier()
        return str(whole._counts.line())


def test_calls_are_counted_by_who_served_them(ranks: Ranks, path: str) -> None:
    assert (
        ranks.run(do_left, path, on=range(2))
        == [
            "served by hsgd: all_reduce 1 calls 40 B; left to torch: "
            "monitored_barrier 1 calls 0 B, recv 1 calls 20 B, send 1 calls 20 B"
        ]
        * 2
    )


def do_detail(seat: Seat, path: str) -> tuple[str, str]:
    """What torch checks in its debug mode, with an error of its own."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with served(), group(seat.rank, 2, path, "gloo") as whole:
            try:
                dist.all_reduce(torch.ones(2 + seat.rank))
            except RuntimeError as error:
                return type(whole).__name__, str(error)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return "", ""


def test_groups_that_torch_checks_itself_stay_with_it(ranks: Ranks, path: str) -> None:
    for kind, text in ranks.run(do_detail, path, on=range(2)):
        assert kind == "ProcessGroup"
        assert "Detected mismatch between collectives" in text


def do_shorten(seat: Seat, path: str, is_async: bool) -> tuple[str, str]:
    """Rank 0 waits in vain, and destroys its group while the other lives and calls nothing."""
    told = dist.FileStore(f"{path}-told", 2)
    with served(), group(seat.rank, 2, path, "gloo"):
        c10d._set_pg_timeout(timedelta(seconds=1))
        if seat.rank == 1:
            told.wait(["destroyed"], LIMIT / 2)
            return "", ""
        with pytest.raises(RuntimeError) as late:
            _wait_for(dist.all_reduce(torch.ones(5), async_op=is_async))
    told.set("destroyed", "")
    return type(late.value).__name__, str(late.value)


@pytest.mark.long
@pytest.mark.parametrize("is_async", [False, True])
def test_a_timeout_that_torch_sets_later_holds(ranks: Ranks, path: str, is_async: bool) -> None:
    kind, text = ranks.run(do_shorten, path, is_async, on=range(2))[0]
    assert kind == "CollectiveTimeout"
    assert " timeout of 1 s" in text  # programs look for the word


def _wait_for(work: Any) -> None:
    if work is not None:
        work.wait()


def do_profile(seat: Seat, path: str) -> list[tuple[str, bool, bool]]:
    """Name, and whether the range ended before what came after it, and has the shapes."""
    with served(), group(seat.rank, 2, path, "gloo"):
        with torch.profiler.profile(record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 2))
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), async_op=True).wait()
            with torch.profiler.record_function("after"):
                dist.barrier()
        events = list(profile.events())
        (after,) = [each for each in events if each.name == "after"]
        return [
            (each.name, each.time_range.end <= after.time_range.start, each.input_shapes)
            for each in events
            if each.name in ("gloo:all_reduce", "gloo:all_gather")
        ]


def test_a_profile_shows_calls_as_those_of_gloo_and_when_they_ended(
    ranks: Ranks, path: str
) -> None:
    for found in ranks.run(do_profile, path, on=range(2)):
        assert sorted(found) == [
            ("gloo:all_gather", True, [[4]]),
            ("gloo:all_reduce", True, [[3, 2]]),
        ]


def do_split(seat: Seat, path: str) -> str:
    with served(), group(seat.rank, 1, path, "gloo") as whole:
        with pytest.raises(NotImplementedError) as told:
            whole.split_group([0], group_name="part")
        return str(told.value)


def test_a_split_is_refused_in_one_line(ranks: Ranks, path: str) -> None:
    (text,) = ranks.run(do_split, path, on=range(1))
    assert text == "split_group: not with HSGD_AS_GLOO=1; use new_group, without device_id="


def do_part_of_others(seat: Seat, path: str) -> list[Any]:
    """A rank that is not of a group, and groups that only their ranks make."""
    with served(), group(seat.rank, 3, path, "gloo"):
        part = dist.new_group([0, 2], timeout=LIMIT)
        own = dist.new_group([0, 2], timeout=LIMIT, use_local_synchronization=True)
        if seat.rank == 1:
            return [part == dist.GroupMember.NON_GROUP_MEMBER]
        seen = []
        for each in (part, own):
            dist.all_reduce(tensor := torch.ones(1) * (seat.rank + 1), group=each)
            seen += [type(each).__name__, tensor.item()]
        return seen


def test_groups_of_some_ranks_are_served(ranks: Ranks, path: str) -> None:
    both = ["GlooGroup", 4.0] * 2
    assert ranks.run(do_part_of_others, path) == [both, [True], both]


def do_come_late(seat: Seat, path: str) -> float:
    """gloo connects nothing when a group is made: the others are not missing, they are late."""
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):
        if seat.rank == 1:
            time.sleep(1)
        with served(), group(seat.rank, 2, path, "gloo"):
            dist.all_reduce(tensor := torch.ones(1))
            return tensor.item()


def test_with_lazy_connections_a_late_rank_is_waited_for(ranks: Ranks, path: str) -> None:
    assert ranks.run(do_come_late, path, on=range(2)) == [2.0, 2.0]


def do_mixed(seat: Seat, path: str) -> str:
    """Rank 1 does not know of hsgd. The others keep the error, and live on."""
    with served() if seat.rank != 1 else contextlib.nullcontext():
        try:
            with group(seat.rank, 3, path, "gloo"):
                dist.barrier()
        except (RuntimeError, ValueError) as error:
            if seat.rank != 1:
                assert not dist.is_initialized() and not c10d._world.pg_map
            seat.kept["error"] = error
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_without_the_switch_is_named_on_the_others(path: str) -> None:
    with Ranks(3) as pool:
        found = pool.run(do_mixed, path, on=range(3), limit_s=LIMIT.total_seconds() / 2)
    expected = (
        "LaunchError: HSGD_AS_GLOO=1 is set here, and rank 1 made the group without it, or has "
        "ended; set it on all ranks, or on none"
    )
    assert (found[0], found[2]) == (expected, expected)
    assert found[1].startswith("RuntimeError")


@pytest.mark.parametrize("name", ["other", "mpi"])
def test_another_backend_is_refused_in_one_line(path: str, name: str) -> None:
    def create(*_: Any) -> None:
        raise AssertionError("never called")

    if "other" not in dist.Backend.backend_list:
        dist.Backend.register_backend("other", create, devices="cpu")
    warnings.simplefilter("ignore")  # torch's, of MPI
    with served(), pytest.raises(LaunchError) as told:
        dist.init_process_group(
            name, store=dist.FileStore(path, 1), rank=0, world_size=1, timeout=LIMIT
        )
    assert str(told.value) == (
        "HSGD_AS_GLOO=1 serves programs with the backend gloo, and this one uses "
        f"{name!r} on the CPU; leave out --gloo or HSGD_AS_GLOO, or change the backend"
    )
    assert not dist.is_initialized()


# The start-up hook and the command line.

C10D = "torch.distributed.distributed_c10d"
LOOK = """
import sys
import torch.distributed as dist
module = dist.distributed_c10d
made = module._new_process_group_helper
print(hasattr(made, "__wrapped__"), made.__module__, "hsgd.c10d.as_gloo" in sys.modules)
print("exec_module" in vars(module.__spec__.loader))
"""


def look(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOOK]
    return run_marked(command, installed_environ(**variables), JOB_S)


@pytest.mark.long
@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_of_torch_is_touched(value: str | None) -> None:
    done = look() if value is None else look(HSGD_AS_GLOO=value)
    assert (done.returncode, done.stdout) == (0, f"False {C10D} False\nFalse\n")


@pytest.mark.long
def test_the_variable_reaches_a_program_that_does_not_know_of_it() -> None:
    done = look(HSGD_AS_GLOO="1")
    assert (done.returncode, done.stdout) == (0, f"True {C10D} True\nTrue\n")


def test_a_wrong_value_ends_the_program_with_one_line() -> None:
    done = look(HSGD_AS_GLOO="yes")
    assert done.returncode == 1
    assert done.stderr == "hsgd: error: HSGD_AS_GLOO=yes: expected 0 or 1\n"


PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
print(f"|{dist.get_rank()} {dist.get_world_size()} {dist.get_backend()}|", flush=True)
dist.destroy_process_group()
"""
HSGD = [sys.executable, "-m", "hsgd"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


@pytest.mark.long
@pytest.mark.parametrize("starts_itself", [False, True])
def test_a_program_that_says_gloo_runs_on_hsgd_unedited(script: str, starts_itself: bool) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["--", *torchrun] if starts_itself else ["-np", "2", sys.executable]
    words = [*HSGD, "run", "--gloo", *command, script]
    done = run_marked(words, installed_environ(HSGD_REPORT="1", OMP_NUM_THREADS="1"), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"\|(.*?)\|", done.stdout)) == ["0 2 gloo", "1 2 gloo"]
    for rank in range(2):
        assert f"hsgd: rank {rank}: served by hsgd: all_gather" in done.stderr
    assert done.stderr.count("left to torch: none") == 2


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["run", "true"], 2, "the following arguments are required: -np/-n"),
        (["run", "--gloo"], 2, "no command to run"),
        (["run", "--gloo", "-H", "a:2", "true"], 2, "-H, --mpi-args and --launcher place ranks"),
        (["run", "--gloo", "--", "no-such-program"], 1, "no-such-program does not start"),
    ],
)
def test_a_command_that_cannot_run_is_refused(words: list[str], code: int, told: str) -> None:
    done = run_marked([*HSGD, *words], installed_environ(), JOB_S)
    assert done.returncode == code
    assert told in done.stderr.splitlines()[-1]


def test_without_the_start_up_hook_gloo_cannot_be_served() -> None:
    done = run_marked(
        [sys.executable, "-S", "-c", _without_site("run", "--gloo", "true")],
        dict(os.environ),
        JOB_S,
    )
    assert done.returncode == 1
    assert "--gloo: the start-up hook does not run in" in done.stderr


def _without_site(*words: str) -> str:
    return (
        f"import sys; sys.path[:0] = {sys.path!r}; from hsgd.tools.cli import main; "
        f"sys.exit(main({list(words)!r}))"
    )


REPORTS = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
for number in range(2):
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(2), group=dist.new_group([0], backend="gloo"))
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_one_line_reports_all_groups_of_a_process() -> None:
    environ = installed_environ(HSGD_AS_GLOO="1", HSGD_REPORT="1")
    done = run_marked([sys.executable, "-c", REPORTS], environ, JOB_S)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hsgd:")]
    told = "hsgd: rank 0: served by hsgd: all_reduce 2 calls 16 B; "
    assert len(lines) == 1 and lines[0].startswith(told)


def test_a_command_that_is_only_shown_has_the_variable() -> None:
    for words in (["-np", "2", "true"], ["--", "torchrun", "train"]):
        done = run_marked([*HSGD, "run", "--gloo", "--dry-run", *words], installed_environ(), JOB_S)
        assert done.stdout.startswith("env HSGD_AS_GLOO=1 ")


@pytest.mark.long
def test_info_says_who_serves_the_name() -> None:
    for value, told in (("1", "hsgd"), ("0", "gloo; hsgd with hsgd run --gloo")):
        done = run_marked([*HSGD, "info"], installed_environ(HSGD_AS_GLOO=value), JOB_S)
        (line,) = [each for each in done.stdout.splitlines() if 'backend "gloo"' in each]
        assert line.split('backend "gloo"')[1].strip(" :").startswith(told)
