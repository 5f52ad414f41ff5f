"""torch's Flight Recorder, where torch has it: groups are made, and recorded if asked for."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from backend_programs import group, register_standin, run_collectives
from ranks import Ranks, Seat

__all__: list[str] = []

MOST_RANKS = 3
records = pytest.mark.skipif(
    not hasattr(_distributed_c10d, "_dump_fr_trace_file"),
    reason="torch 2.15 brought it: make test-torch TORCH=2.15.0",
)


def do_attach(seat: Seat, path: str, backend: str) -> tuple[str, list[float]]:
    register_standin()
    tensor = torch.ones(2)
    with group(seat.rank, 2, path, backend) as whole:
        dist.all_reduce(tensor)
        part = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=part)
        return whole.group_name, tensor.tolist()


@pytest.mark.parametrize("backend", ["hsgd", "cpu:hsgd,meta:standin"])
def test_a_group_is_made_where_torch_attaches_its_recorder(
    ranks: Ranks, path: str, backend: str
) -> None:
    for name, values in ranks.run(do_attach, path, backend, on=range(2)):
        assert name
        assert values == [4.0, 4.0]


def entries() -> list[dict[str, Any]]:
    trace = json.loads(_distributed_c10d._dump_fr_trace_json(backend="hsgd"))  # type: ignore[attr-defined]
    return [*trace.get("entries", [])]


def do_record(seat: Seat, path: str, size: str) -> tuple[list[Any], list[dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", size)
        before = len(entries())
        with group(seat.rank, 2, path):
            results = [*run_collectives(seat.rank, 2).values()]
    return results, entries()[before:]


@records
def test_a_recorder_that_is_asked_for_sees_each_collective_and_changes_no_result(
    ranks: Ranks, path: str
) -> None:
    plain = ranks.run(do_record, f"{path}-0", "0", on=range(2))
    found = ranks.run(do_record, f"{path}-1", "2000", on=range(2))
    for (expected, none), (results, seen) in zip(plain, found, strict=True):
        assert none == []
        assert results == expected
        names = {entry["profiling_name"] for entry in seen}
        assert names == {
            *("hsgd:all_reduce", "hsgd:allreduce_coalesced", "hsgd:reduce", "hsgd:broadcast"),
            *("hsgd:all_gather", "hsgd:all_gather_into_tensor_coalesced", "hsgd:gather"),
            *("hsgd:scatter", "hsgd:reduce_scatter", "hsgd:reduce_scatter_tensor_coalesced"),
            *("hsgd:all_to_all", "hsgd:all_to_all_single", "hsgd:barrier"),
        }
        assert all(entry["retired"] for entry in seen)
        (first, *_) = (each for each in seen if each["profiling_name"] == "hsgd:all_reduce")
        assert first["input_sizes"] == [[10]]
        assert first["process_group"][1] == "default_pg"


def do_hang(seat: Seat, path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{path}-trace-")
        with group(seat.rank, 2, path, limit=timedelta(seconds=1)):
            dist.all_reduce(torch.ones(3))
            if seat.rank == 1:
                seat.tell("waits")
                assert seat.pipe.recv() == "go"
                return ""
            try:
                dist.all_reduce(torch.ones(5), async_op=True).wait()
            except TimeoutError as error:
                return str(error)
    return "nothing happened"


@records
def test_a_rank_that_does_not_come_leaves_the_collective_in_torchs_dump(path: str) -> None:
    with Ranks(2) as ranks:  # torch reads the name of its file once in a process
        ranks.start(do_hang, path)
        ranks.hear(1)
        (late,) = ranks.finish(on=(0,))
        ranks.send(1, "go")
        ranks.finish(on=(1,))
    assert "rank 1" in late.value, late.trace
    with open(f"{path}-trace-0", "rb") as file:
        seen = pickle.load(file)["entries"]
    state = {tuple(map(tuple, entry["input_sizes"])): entry["retired"] for entry in seen}
    assert state == {((3,),): True, ((5,),): False}
