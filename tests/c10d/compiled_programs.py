"""Functions with collectives, eager and compiled, on the ranks of torchrun.

Arguments: backend of torch.distributed, backend of torch.compile. Each rank prints a line of JSON:
by case, "equal", "differs", or the first line of an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__: list[str] = []

Case = Callable[[Tensor], Tensor]


def halves(x: Tensor) -> list[Tensor]:
    return [torch.empty(len(x) // 2) for _ in range(2)]


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x * 2


def all_reduce_async(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    y = x + 1
    work.wait()
    return x * 2 + 0 * y


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x * 2


def broadcast_async(x: Tensor) -> Tensor:
    dist.broadcast(x, 1, async_op=True).wait()
    return x * 2


def reduce(x: Tensor) -> Tensor:
    dist.reduce(x, 0)
    return x * 1 if dist.get_rank() == 0 else torch.zeros_like(x)


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def all_gather_into_tensor(x: Tensor) -> Tensor:
    y = torch.empty(2 * len(x))
    dist.all_gather_into_tensor(y, x)
    return y


def all_gather_into_tensor_async(x: Tensor) -> Tensor:
    y = torch.empty(2 * len(x))
    dist.all_gather_into_tensor(y, x, async_op=True).wait()
    return y


def reduce_scatter(x: Tensor) -> Tensor:
    y = torch.empty(len(x) // 2)
    dist.reduce_scatter(y, list(x.chunk(2)))
    return y


def reduce_scatter_tensor(x: Tensor) -> Tensor:
    y = torch.empty(len(x) // 2)
    dist.reduce_scatter_tensor(y, x)
    return y


def all_to_all(x: Tensor) -> Tensor:
    parts = halves(x)
    dist.all_to_all(parts, list(x.chunk(2)))
    return torch.cat(parts)


def all_to_all_single(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(x, parts, 0)
    return x if parts is None else torch.cat(parts)


def scatter(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.scatter(y, [x, x + 1] if dist.get_rank() == 0 else None, 0)
    return y


def send_recv(x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
        return x
    y = torch.empty_like(x)
    dist.recv(y, 0)
    return y * 2


def batch_isend_irecv(x: Tensor) -> Tensor:
    y, other = torch.empty_like(x), 1 - dist.get_rank()
    calls = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return y


def barrier(x: Tensor) -> Tensor:
    dist.barrier()
    return x + 1


def objects(x: Tensor) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank() + 1)
    return x * found[1]


def functional(x: Tensor) -> Tensor:
    y = funcol.all_reduce(x, "sum", [0, 1])
    return funcol.all_gather_tensor(y, 0, [0, 1]) + 1


def own_group(x: Tensor) -> Tensor:
    dist.all_reduce(x, group=ALONE)
    return funcol.all_reduce(x, "sum", ALONE) + 1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(net: nn.Module, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the parameters after three steps on data of this rank."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        call(torch.full((4, 8), 0.1 * (dist.get_rank() + step + 1))).square().sum().backward()
        optimizer.step()
    # FSDP's parameters are parts of their own.
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def ddp(compiled: Callable[[Any], Any]) -> Tensor:
    net = DistributedDataParallel(model())
    return trained(net, compiled(net))


def ddp_python_reducer(compiled: Callable[[Any], Any]) -> Tensor:
    import torch._dynamo

    settings = {"optimize_ddp": "python_reducer", "compiled_autograd": True}
    with torch._dynamo.config.patch(**settings):
        return ddp(compiled)


def fsdp2(compiled: Callable[[Any], Any]) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model(), mesh=init_device_mesh("cpu", (2,)))
    return trained(net, compiled(net))


PLAIN: list[Case] = [
    *(all_reduce, all_reduce_async, broadcast, broadcast_async, reduce, all_gather),
    *(all_gather_into_tensor, all_gather_into_tensor_async, reduce_scatter),
    *(reduce_scatter_tensor, all_to_all, all_to_all_single, gather, scatter, send_recv),
    *(batch_isend_irecv, barrier, objects, functional, own_group),
]
MODELS = [ddp, ddp_python_reducer, fsdp2]


def outcome(eager: Callable[[], Tensor], compiled: Callable[[], Tensor]) -> str:
    torch.compiler.reset()
    expected = eager()
    try:
        found = compiled()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    finally:
        dist.barrier()
    return "equal" if torch.equal(found, expected) else f"differs: {found} {expected}"


def main() -> None:
    global ALONE
    backend, compiler = sys.argv[1:]
    dist.init_process_group(backend)
    groups = [dist.new_group([rank]) for rank in range(2)]
    ALONE = groups[dist.get_rank()]
    own = torch.arange(4.0) + 10 * dist.get_rank()
    found = {}
    for case in PLAIN:
        for whole in (False, True):
            call = torch.compile(case, backend=compiler, fullgraph=whole)
            name = f"{case.__name__}{' fullgraph' if whole else ''}"
            found[name] = outcome(lambda c=case: c(own.clone()), lambda c=call: c(own.clone()))
    for train in MODELS:
        found[train.__name__] = outcome(
            lambda t=train: t(lambda net: net),
            lambda t=train: t(lambda net: torch.compile(net, backend=compiler)),
        )
    os.write(1, f"{json.dumps(found)}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
