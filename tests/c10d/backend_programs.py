"""What ranks do in the tests of the torch.distributed backend: the same calls over any backend.

Owns the inputs. Never compares: the tests do, between backends and ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

import hsgd.c10d
from hsgd.c10d import torch_versions

__all__ = [
    "COLLECTIVES",
    "LIMIT",
    "group",
    "made",
    "not_in_torch_2_7",
    "register_standin",
    "run_collective",
    "run_collectives",
    "run_what_gloo_has",
]

LIMIT = timedelta(seconds=30)
not_in_torch_2_7 = pytest.mark.skipif(
    not torch_versions.blocking_returns_none, reason="torch 2.7 cannot do it itself"
)
Tensor = torch.Tensor


@contextlib.contextmanager
def group(
    rank: int, size: int, path: str, backend: str = "hsgd", limit: timedelta = LIMIT
) -> Iterator[Any]:
    """The default process group of `size` ranks that meet in a file; destroyed at the end."""
    hsgd.c10d.register()
    store = dist.FileStore(f"{path}-{backend.replace(':', '')}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def made(rank: int, count: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Small numbers that differ from rank to rank, exact in every dtype."""
    numbers = (torch.arange(count) * 7 + rank * 5 + salt) % 4
    return (numbers > 1) if dtype == torch.bool else (numbers + 1).to(dtype)


def register_standin() -> None:
    """For "cuda:nccl": torch's fake backend as "meta:standin", for tensors without memory."""

    def create(store: Any, rank: int, size: int, limit: Any) -> Any:
        make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
        return make(rank, size)

    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", create, devices="meta")


def _all_reduce(rank: int, size: int) -> list[Tensor]:
    results = [made(rank, 10), made(rank, 0), made(rank, 1).reshape(()), made(rank, 70000)]
    results += [made(rank, 12).reshape(3, 4).t()]
    for tensor in results:
        dist.all_reduce(tensor)
    return results


def _all_reduce_max(rank: int, size: int) -> list[Tensor]:
    tensor = made(rank, 33, torch.int64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [tensor]


def _all_reduce_coalesced(rank: int, size: int) -> list[Tensor]:
    tensors = [made(rank, 3), made(rank, 12).reshape(3, 4), made(rank, 1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def _all_reduce_sparse(rank: int, size: int) -> list[Tensor]:
    places = torch.tensor([[rank, 3, rank]])  # one of them twice
    tensor = torch.sparse_coo_tensor(places, torch.ones(3, 2) * (rank + 1), (6, 2))
    dist.all_reduce(tensor)
    return [tensor.to_dense()]


def _broadcast(rank: int, size: int) -> list[Tensor]:
    tensors = [made(rank, 7), made(rank, 5, torch.bool), made(rank, 6, torch.complex64)]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, root % size)
    return tensors


def _reduce(rank: int, size: int) -> list[Tensor]:
    tensor = made(rank, 11)
    dist.reduce(tensor, size - 1)
    return [tensor] if rank == size - 1 else []


def _all_gather(rank: int, size: int) -> list[Tensor]:
    places = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(places, made(rank, 6).reshape(2, 3))
    marks = [torch.zeros(5, dtype=torch.int8) for _ in range(size)]
    dist.all_gather(marks, made(rank, 5, torch.int8))
    return places + marks


def _all_gather_coalesced(rank: int, size: int) -> list[Tensor]:
    sent = [made(rank, 6).reshape(2, 3), made(rank, 1, salt=1), made(rank, 5)]
    places = [[torch.zeros_like(each) for each in sent] for _ in range(size)]
    dist.all_gather_coalesced(places, sent)
    return [place for parts in places for place in parts]


def _all_gather_into_tensor(rank: int, size: int) -> list[Tensor]:
    joined, turned = torch.zeros(size * 3), torch.zeros(2 * size, 2)
    dist.all_gather_into_tensor(joined, made(rank, 3))
    dist.all_gather_into_tensor(turned, made(rank, 4).reshape(2, 2).t())
    return [joined, turned]


def _gather(rank: int, size: int) -> list[Tensor]:
    root = size - 1
    places = [torch.zeros(4) for _ in range(size)] if rank == root else None
    dist.gather(made(rank, 4), places, dst=root)
    return places or []


def _scatter(rank: int, size: int) -> list[Tensor]:
    parts = [made(part, 4, torch.complex64) for part in range(size)] if rank == 0 else None
    place = torch.zeros(4, dtype=torch.complex64)
    dist.scatter(place, parts, src=0)
    return [place]


def _reduce_scatter(rank: int, size: int) -> list[Tensor]:
    place = torch.zeros(2, 2)
    dist.reduce_scatter(place, [made(rank, 4, salt=k).reshape(2, 2) for k in range(size)])
    return [place]


def _reduce_scatter_tensor(rank: int, size: int) -> list[Tensor]:
    place, turned = torch.zeros(5), torch.zeros(2, 3).t()
    dist.reduce_scatter_tensor(place, made(rank, 5 * size))
    dist.reduce_scatter_tensor(turned, made(rank, 6 * size).reshape(3 * size, 2))
    return [place, turned]


def _all_to_all(rank: int, size: int) -> list[Tensor]:
    places = [torch.zeros(3) for _ in range(size)]
    dist.all_to_all(places, [made(rank, 3, salt=to) for to in range(size)])
    return places


def _all_to_all_single(rank: int, size: int) -> list[Tensor]:
    even = torch.zeros(2 * size, 2)
    dist.all_to_all_single(even, made(rank, 4 * size).reshape(2 * size, 2))
    sent = [(rank + to) % 3 for to in range(size)]
    kept = [(source + rank) % 3 for source in range(size)]
    ragged = torch.zeros(sum(kept), 2, dtype=torch.int8)
    whole = made(rank, 2 * sum(sent), torch.int8).reshape(-1, 2)
    dist.all_to_all_single(ragged, whole, kept, sent)
    return [even, ragged]


def _objects(rank: int, size: int) -> list[Tensor]:
    seen: list[Any] = [None] * size
    dist.all_gather_object(seen, {"rank": rank, "text": "x" * rank})
    assert seen == [{"rank": k, "text": "x" * k} for k in range(size)]
    reports: list[Any] = [{"from": 0}, rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(reports)
    assert reports == [{"from": 0}, 0]
    handed: list[Any] = [None]
    dist.scatter_object_list(handed, [f"part {k}" for k in range(size)] if rank == 0 else None)
    assert handed == [f"part {rank}"]
    taken: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 2, taken)
    assert taken == ([2 * k for k in range(size)] if rank == 0 else None)
    return []


def _messages(rank: int, size: int) -> list[Tensor]:
    place, anybody = torch.zeros(5), torch.zeros(3)
    if size == 1:
        return []
    requests = [dist.isend(made(rank, 5), (rank + 1) % size, tag=1)]
    dist.recv(place, (rank - 1) % size, tag=1)
    if rank == 0:
        sources = [dist.recv(anybody, tag=2) for _ in range(size - 1)]
        assert sorted(sources) == list(range(1, size))
    else:
        requests.append(dist.isend(made(0, 3), 0, tag=2))
    for request in requests:
        request.wait()
    both = [
        dist.P2POp(dist.isend, made(rank, 4), (rank - 1) % size),
        dist.P2POp(dist.irecv, other := torch.zeros(4), (rank + 1) % size),
    ]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    return [place, other]


def _coalescing(rank: int, size: int) -> list[Tensor]:
    """torch's functional collectives, which call the group from C++."""
    from torch.distributed import _functional_collectives as functional

    whole = dist.group.WORLD
    assert whole is not None
    sums = functional.all_reduce_coalesced([made(rank, 3), made(rank, 4)], "sum", whole)
    joined = functional.all_gather_into_tensor_coalesced([made(rank, 2), made(rank, 3)], whole)
    parts = [made(rank, 2 * size), made(rank, 3 * size)]
    kept = functional.reduce_scatter_tensor_coalesced(parts, "sum", [0, 0], whole)
    moved = functional.all_to_all_single(made(rank, 2 * size), None, None, whole)
    return [+tensor for tensor in [*sums, *joined, *kept, moved]]


def _subgroups(rank: int, size: int) -> list[Tensor]:
    results = []
    for members in ([size - 1], list(range(size)), list(range(size))[::-1][:2]):
        part = dist.new_group(members, timeout=LIMIT)
        if rank in members:
            tensor = made(rank, 6)
            dist.all_reduce(tensor, group=part)
            dist.broadcast(root := made(rank, 3), members[0], group=part)
            results += [tensor, root]
            dist.barrier(part)
            dist.destroy_process_group(part)
    return results


def _barriers(rank: int, size: int) -> list[Tensor]:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    return []


COLLECTIVES: dict[str, Callable[[int, int], list[Tensor]]] = {
    function.__name__.strip("_"): function
    for function in (
        *(_all_reduce, _all_reduce_max, _all_reduce_coalesced, _all_reduce_sparse, _broadcast),
        *(
            _reduce,
            _all_gather,
            _all_gather_coalesced,
            _all_gather_into_tensor,
            _gather,
            _scatter,
            _reduce_scatter,
        ),
        *(_reduce_scatter_tensor, _all_to_all, _all_to_all_single, _objects, _messages),
        *(_coalescing, _subgroups, _barriers),
    )
}


def run_collective(name: str, rank: int, size: int) -> list[Any]:
    """The results of a collective as nested lists."""
    results = COLLECTIVES[name](rank, size)
    real = [torch.view_as_real(each) if each.is_complex() else each for each in results]
    return [each.tolist() for each in real]


def run_collectives(rank: int, size: int) -> dict[str, list[Any]]:
    """The results of all collectives by name, in one process group that is there already."""
    return {name: run_collective(name, rank, size) for name in COLLECTIVES}


def run_what_gloo_has(rank: int, size: int) -> dict[str, list[Any]]:
    """The same over gloo: that of torch 2.7 and 2.9 refuses some collectives, on all ranks."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return run_collectives(rank, size)
    found = {}
    for name in COLLECTIVES:
        try:
            found[name] = run_collective(name, rank, size)
        except RuntimeError as error:
            refused = ("does not support", "Invalid scalar type", "not supported", "not implement")
            if not any(text in str(error) for text in refused):
                raise
    return found
