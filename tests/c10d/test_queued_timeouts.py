"""A group under the name gloo whose timeout is shortened while its calls go to the core's queue.

Run by itself, with a rank, a file and a case, this file is the program of a rank.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backend_programs import not_in_torch_2_7
from site_copy import installed_environ
from toolkit.processes import run_marked

__all__: list[str] = []

SIZE = 3
ABSENT = 1  # the rank that does not come
LONG_S = 60.0  # what the group is made with
SHORT_S = (1.0, 1.0, 10.0)  # what it is shortened to, by rank
NOTICED_S = 20.0  # a third of the first
JOB_S = 150.0


def run_ranks(path: str, case: str) -> list[dict[str, Any]]:
    """What each rank tells; all end by themselves, and well."""
    environ = installed_environ(HSGD_AS_GLOO="1", OMP_NUM_THREADS="1")

    def run(rank: int) -> dict[str, Any]:
        done = run_marked([sys.executable, __file__, str(rank), path, case], environ, JOB_S)
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        return dict(json.loads(done.stdout))

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


@pytest.mark.long
@not_in_torch_2_7
@pytest.mark.parametrize("case", ["alone", "behind a queued call"])
def test_a_rank_that_does_not_come_is_named_within_the_shortened_timeout(
    path: str, case: str
) -> None:
    found = run_ranks(path, case)
    assert [each["kinds"] for each in found] == [[True] * 4] * SIZE
    for each in found[:ABSENT] + found[ABSENT + 1 :]:
        assert each["kind"] == "CollectiveTimeout"
        assert " not finished within the timeout of 1 s: rank 1 (pid " in each["line"]
        assert " did not call it; make a new communicator or process group" in each["line"]
        assert each["rank"] == ABSENT
        assert each["noticed_s"] < NOTICED_S and each["destroyed_s"] < NOTICED_S
        assert each["ended"] == [True] * (2 if case == "alone" else 3)


# --- the program of a rank ---


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def queue_some() -> list[bool]:
    """Calls of one plain tensor that all ranks make; whether the core executes them directly."""
    works = []
    for count in (1, 5, 70_000):
        tensor = torch.ones(count)
        works.append(dist.all_reduce(tensor, async_op=True))
        assert works[-1].wait() and bool((tensor == SIZE).all())
    joined = torch.empty(SIZE * 2)
    works.append(dist.all_gather_into_tensor(joined, torch.ones(2), async_op=True))
    assert works[-1].wait() and joined.tolist() == [1.0] * SIZE * 2
    return [work.is_native for work in works]


def wait_in_vain(works: list[Any]) -> dict[str, Any]:
    """Waits for the last one of `works`; the others fail with it."""
    begin = time.monotonic()
    with pytest.raises(TimeoutError) as told:
        works[-1].wait()
    noticed_s = time.monotonic() - begin
    dist.destroy_process_group()
    return {
        "kind": type(told.value).__name__,
        "line": str(told.value),
        "rank": getattr(told.value, "rank", None),
        "noticed_s": noticed_s,
        "destroyed_s": time.monotonic() - begin,
        "ended": [work.is_completed() and work.exception() is not None for work in works],
    }


def main() -> None:
    rank, path, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    store = dist.FileStore(path, SIZE)
    limit = timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=limit)
    facts: dict[str, Any] = {"kinds": queue_some()}
    gave_up = [Path(f"{path}-{each}") for each in range(SIZE) if each != ABSENT]
    works = []
    if rank != ABSENT and case != "alone":
        works.append(dist.all_reduce(torch.ones(5), async_op=True))
        assert works[0].is_native and not works[0].is_completed()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SHORT_S[rank]))
    if rank == ABSENT:
        for file in gave_up:
            wait_for(file)
        dist.destroy_process_group()
    else:
        works += [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
        facts |= wait_in_vain(works)
        Path(f"{path}-{rank}").touch()
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
