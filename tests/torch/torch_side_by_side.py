"""Run under mpirun: every public name of horovod.torch on both packages, with the same arguments.

Each case is a function of `hvd` that returns what it computed, as numbers; an exception counts by
its class. Prints what differs, and which names no case has asked for, and exits with 1 then. Values
of floats may differ by the order of the sum: bitwise with two ranks, 1e-5 beyond.

Unlike Horovod, and on purpose: more dtypes work, zero_grad() takes set_to_none, generators may be
broadcast, SyncBatchNorm runs on CPU, and gathering while a rank has joined is an error (Horovod
0.28.1 overwrites memory then). Those are tested elsewhere.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import hsgd.torch as ours

__all__: list[str] = []

CASES: list[Callable[[Any], Any]] = []
messages: list[str] = []  # of errors, for reports
DTYPES = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
MOVED = (*DTYPES, torch.uint8, torch.int8, torch.int16)
ELSEWHERE = {"elastic.run": "torch_horovods_own.py"}  # names that are tested there
CALLED: set[str] = set()


class Watched:
    """A package; names that are asked for are noted in CALLED."""

    def __init__(self, package: ModuleType, prefix: str = "") -> None:
        self._package = package
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._package, name)
        if isinstance(value, ModuleType):
            return Watched(value, f"{self._prefix}{name}.")
        CALLED.add(f"{self._prefix}{name}")
        return value


def uncalled(theirs: ModuleType) -> list[str]:
    """Public names of Horovod's that no case has asked for."""
    inner = {"check_extension", "elastic.elastic"}
    names = [name for name in dir(theirs) if not isinstance(getattr(theirs, name), ModuleType)]
    names += [f"elastic.{name}" for name in theirs.elastic.__all__]
    public = {name for name in names if not name.startswith("_")} - inner
    return sorted(public - CALLED - ELSEWHERE.keys())


def case(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CASES.append(function)
    return function


def caught(call: Callable[[], Any]) -> Any:
    """The value of a call, or the class that it raised."""
    try:
        return call()
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
        return f"raised {type(error).__name__}"


def values(hvd: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different on each rank, small enough to be exact where that matters."""
    generator = torch.Generator().manual_seed(hvd.rank())
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, shape, generator=generator).to(dtype)


@case
def places(hvd: Any) -> Any:
    report = (
        "rank size local_rank local_size cross_rank cross_size is_initialized mpi_enabled mpi_built"
    )
    built = (
        "gloo_enabled mpi_threads_supported nccl_built cuda_built rocm_built ddl_built ccl_built"
    )
    return [getattr(hvd, name)() for name in f"{report} {built}".split()]


@case
def homogeneous(hvd: Any) -> Any:
    return hvd.mpi_ops.is_homogeneous()


@case
def gloo_is_there_or_not(hvd: Any) -> Any:
    return isinstance(hvd.gloo_built(), bool)


@case
def errors(hvd: Any) -> Any:
    kind = hvd.HorovodInternalError
    return [kind.__name__, issubclass(kind, RuntimeError)]


@case
def constants(hvd: Any) -> Any:
    return [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]


@case
def allreduce_of_all_dtypes_and_ops(hvd: Any) -> Any:
    found = []
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            found.append(hvd.allreduce(values(hvd, 5, 3, dtype=dtype), op=op))
    return found


@case
def allreduce_of_odd_shapes(hvd: Any) -> Any:
    return [hvd.allreduce(values(hvd, *shape)) for shape in ((), (1,), (0,), (2, 0, 3), (1 << 17,))]


@case
def allreduce_in_place(hvd: Any) -> Any:
    tensor = values(hvd, 7)
    result = hvd.allreduce_(tensor, name="in place", op=hvd.Sum)
    return [tensor, result, result.data_ptr() == tensor.data_ptr()]


@case
def allreduce_scaled(hvd: Any) -> Any:
    found = []
    for dtype in (torch.int32, torch.float32, torch.float64):
        for op in (hvd.Average, hvd.Sum):
            tensor = values(hvd, 9, dtype=dtype)
            found.append(hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=3.0))
    return found


@case
def allreduce_async_in_turn(hvd: Any) -> Any:
    tensors = [values(hvd, n + 1) for n in range(5)]
    handles = [hvd.allreduce_async(t, name=f"turn.{n}") for n, t in enumerate(tensors)]
    handles += [hvd.allreduce_async_(t.clone(), name=f"in.{n}") for n, t in enumerate(tensors)]
    results = [hvd.synchronize(handle) for handle in reversed(handles)]
    return [results, hvd.synchronize(handles[0])]


@case
def poll_becomes_true(hvd: Any) -> Any:
    handle = hvd.allreduce_async(values(hvd, 4), name="polled")
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


@case
def poll_of_no_handle(hvd: Any) -> Any:
    return caught(lambda: hvd.poll(1 << 30))


@case
def allreduce_average_argument(hvd: Any) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [hvd.allreduce(values(hvd, 3), average=flag) for flag in (True, False)]
    classes = {warning.category.__name__ for warning in seen}
    return [found, "DeprecationWarning" in classes]


@case
def allreduce_op_and_average(hvd: Any) -> Any:
    return caught(lambda: hvd.allreduce(values(hvd, 3), average=True, op=hvd.Sum))


@case
def allreduce_compressed(hvd: Any) -> Any:
    tensor = values(hvd, 64).round()
    return [
        hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum),
        hvd.allreduce(tensor.long(), compression=hvd.Compression.fp16, op=hvd.Sum),
        hvd.allreduce(tensor, compression=hvd.Compression.none, op=hvd.Sum),
    ]


@case
def allreduce_gradient(hvd: Any) -> Any:
    found = []
    for op in (hvd.Average, hvd.Sum):
        tensor = values(hvd, 4).requires_grad_()
        (hvd.allreduce(tensor, op=op) * values(hvd, 4)).sum().backward()
        found.append(tensor.grad)
    return found


@case
def grouped_allreduce(hvd: Any) -> Any:
    tensors = [values(hvd, n + 1, 2) for n in range(3)]
    copies = [tensor.clone() for tensor in tensors]
    found = [
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.grouped_allreduce_(copies, name="group"),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Max)),
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, prescale_factor=2.0)),
    ]
    return [found, copies, tensors]


@case
def grouped_allreduce_gradient(hvd: Any) -> Any:
    tensors = [values(hvd, n + 2).requires_grad_() for n in range(2)]
    reduced = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    sum((tensor * (n + hvd.rank())).sum() for n, tensor in enumerate(reduced)).backward()
    return [tensor.grad for tensor in tensors]


@case
def allgather_of_all_dtypes(hvd: Any) -> Any:
    return [hvd.allgather(values(hvd, 3, 2, dtype=dtype)) for dtype in MOVED]


@case
def allgather_of_uneven_rows(hvd: Any) -> Any:
    rows = [hvd.rank(), 2 * hvd.rank() + 1, hvd.rank() % 2]
    return [hvd.allgather(values(hvd, count, 3), name=f"rows.{n}") for n, count in enumerate(rows)]


@case
def allgather_gradient(hvd: Any) -> Any:
    tensor = values(hvd, hvd.rank() + 1, 2).requires_grad_()
    gathered = hvd.allgather(tensor)
    (gathered * (hvd.rank() + 1)).sum().backward()
    return [gathered.detach(), tensor.grad]


@case
def grouped_allgather(hvd: Any) -> Any:
    tensors = [values(hvd, hvd.rank() + n, 2) for n in range(3)]
    handle = hvd.grouped_allgather_async(tensors, name="gathered")
    return [hvd.grouped_allgather(tensors), hvd.synchronize(handle)]


@case
def grouped_allgather_gradient(hvd: Any) -> Any:
    tensors = [values(hvd, n + 1).requires_grad_() for n in range(2)]
    sum((g * 2).sum() for g in hvd.grouped_allgather(tensors)).backward()
    return [tensor.grad for tensor in tensors]


@case
def broadcast_of_all_dtypes_and_roots(hvd: Any) -> Any:
    found = []
    for root in range(hvd.size()):
        found += [hvd.broadcast(values(hvd, 4, dtype=dtype), root) for dtype in MOVED]
    return found


@case
def broadcast_in_place(hvd: Any) -> Any:
    tensor = values(hvd, 2, 3)
    same = hvd.broadcast_(tensor, 1, name="b").data_ptr() == tensor.data_ptr()
    later = values(hvd, 3)
    handles = [hvd.broadcast_async_(later, 0), hvd.broadcast_async(values(hvd, 2), 1)]
    return [tensor, same, [hvd.synchronize(handle) for handle in handles], later]


@case
def broadcast_gradient(hvd: Any) -> Any:
    tensor = values(hvd, 3).requires_grad_()
    (hvd.broadcast(tensor, 1) * (hvd.rank() + 2)).sum().backward()
    return tensor.grad


@case
def alltoall_evenly(hvd: Any) -> Any:
    return [hvd.alltoall(values(hvd, 2 * hvd.size(), 3, dtype=dtype)) for dtype in MOVED]


@case
def alltoall_with_splits(hvd: Any) -> Any:
    splits = [(hvd.rank() + n) % 3 for n in range(hvd.size())]
    tensor = values(hvd, sum(splits) + 1, 2)
    found = [
        hvd.alltoall(tensor, splits=splits),
        hvd.alltoall(tensor, splits=torch.tensor(splits, dtype=torch.int32), name="splits"),
        hvd.synchronize(hvd.alltoall_async(tensor, splits)),
    ]
    return found


@case
def alltoall_gradient(hvd: Any) -> Any:
    tensor = values(hvd, hvd.size(), 2).requires_grad_()
    (hvd.alltoall(tensor) * (hvd.rank() + 1)).sum().backward()
    splits = [(hvd.rank() + n) % 2 + 1 for n in range(hvd.size())]
    other = values(hvd, sum(splits)).requires_grad_()
    (hvd.alltoall(other, splits=splits)[0] * (hvd.rank() + 1)).sum().backward()
    return [tensor.grad, other.grad]


@case
def reducescatter_of_all_dtypes(hvd: Any) -> Any:
    found = []
    for dtype in DTYPES:
        for op in (hvd.Average, hvd.Sum):
            found.append(hvd.reducescatter(values(hvd, 2 * hvd.size() + 1, 2, dtype=dtype), op=op))
    return found


@case
def reducescatter_scaled_and_later(hvd: Any) -> Any:
    tensor = values(hvd, hvd.size() + 1, 2)
    scales = {"prescale_factor": 2.0, "postscale_factor": 0.25}
    return [
        hvd.reducescatter(tensor, op=hvd.Sum, **scales),
        hvd.reducescatter(tensor, compression=hvd.Compression.fp16, op=hvd.Sum).shape,
        hvd.synchronize(hvd.reducescatter_async(tensor, name="later")),
        hvd.grouped_reducescatter([tensor, 2 * tensor], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async([tensor, -tensor], name="both")),
    ]


@case
def reducescatter_gradient(hvd: Any) -> Any:
    found = []
    for op in (hvd.Average, hvd.Sum):
        tensor = values(hvd, 2 * hvd.size()).requires_grad_()
        (hvd.reducescatter(tensor, op=op) * (hvd.rank() + 1)).sum().backward()
        pair = [values(hvd, hvd.size()).requires_grad_() for _ in range(2)]
        sum((g * 3).sum() for g in hvd.grouped_reducescatter(pair, op=op)).backward()
        found += [tensor.grad, *(member.grad for member in pair)]
    return found


@case
def sparse_allreduce(hvd: Any) -> Any:
    found = []
    for op in (hvd.Average, hvd.Sum):
        places = torch.tensor([[0, hvd.rank() + 1], [hvd.rank(), 0]])
        tensor = torch.sparse_coo_tensor(places, values(hvd, 2), (6, 6))
        found.append(hvd.sparse_allreduce_async(tensor, f"sparse.{op}", op)().to_dense())
    return found


@case
def unusable_tensors(hvd: Any) -> Any:
    gaps = torch.ones(4, 4).t()[1:]
    boolean = torch.ones(3, dtype=torch.bool)
    return [
        caught(lambda: hvd.allreduce(gaps)),
        caught(lambda: hvd.allgather(gaps)),
        caught(lambda: hvd.broadcast(gaps, 0)),
        caught(lambda: hvd.alltoall(gaps)),
        caught(lambda: hvd.reducescatter(gaps)),
        caught(lambda: hvd.allreduce(boolean)),
        caught(lambda: hvd.allreduce(torch.ones(3, dtype=torch.int16))),
        caught(lambda: hvd.reducescatter(boolean)),
    ]


@case
def scalars_where_rows_are_needed(hvd: Any) -> Any:
    return [
        caught(lambda: hvd.allgather(torch.tensor(1.0))),
        caught(lambda: hvd.synchronize(hvd.allgather_async(torch.tensor(1.0)))),
        caught(lambda: hvd.reducescatter(torch.tensor(1.0))),
    ]


@case
def bad_arguments(hvd: Any) -> Any:
    size = hvd.size()
    return [
        caught(lambda: hvd.broadcast(torch.ones(2), size)),
        caught(lambda: hvd.broadcast(torch.ones(2), -1)),
        caught(lambda: hvd.alltoall(torch.ones(size + 1))),
        caught(lambda: hvd.alltoall(torch.ones(size), splits=[size + 1, *[0] * (size - 1)])),
        caught(lambda: hvd.alltoall(torch.ones(size), splits=[1] * (size + 1))),
        caught(lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(size))),
        caught(lambda: hvd.alltoall(torch.ones(size), splits=torch.ones(1, size).int())),
        caught(lambda: hvd.reducescatter(torch.ones(size), op=hvd.Max)),
        caught(lambda: hvd.synchronize(None)),
    ]


@case
def ranks_that_disagree(hvd: Any) -> Any:
    rank = hvd.rank()
    odd = bool(rank % 2)
    return [
        caught(lambda: hvd.allreduce(torch.ones(3 + odd), name="shape")),
        caught(
            lambda: hvd.allreduce(torch.ones(2, 3).reshape((3, 2) if odd else (2, 3)), name="t")
        ),
        caught(lambda: hvd.allreduce(torch.ones(3).to(DTYPES[2 + odd]), name="dtype")),
        caught(lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if odd else hvd.Max, name="op")),
        caught(lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + odd, name="scale")),
        caught(lambda: hvd.allgather(torch.ones(2, 3 + odd), name="columns")),
        caught(lambda: hvd.allgather(torch.ones(2).to(DTYPES[3 + odd]), name="gathered")),
        caught(lambda: hvd.broadcast(torch.ones(2 + odd), 0, name="b shape")),
        caught(lambda: hvd.broadcast(torch.ones(2), rank, name="b root")),
        caught(lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + odd), name="a columns")),
        caught(lambda: hvd.reducescatter(torch.ones(8 + odd), name="r shape")),
        hvd.allreduce(torch.ones(3), name="and all goes on"),
    ]


@case
def different_orders(hvd: Any) -> Any:
    names = [f"order.{n}" for n in range(6)]
    turned = names[hvd.rank() :] + names[: hvd.rank()]
    handles = {n: hvd.allreduce_async(torch.full((2,), float(n[-1])), name=n) for n in turned}
    return [hvd.synchronize(handles[name]) for name in names]


@case
def barriers(hvd: Any) -> Any:
    return [hvd.barrier(), hvd.barrier()]


@case
def broadcast_parameters(hvd: Any) -> Any:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    first = [tensor.clone() for tensor in model.state_dict().values()]
    hvd.broadcast_parameters(list(model.named_parameters()), 1)
    hvd.broadcast_parameters(list(model.parameters()), 0)
    return [first, list(model.parameters()), caught(lambda: hvd.broadcast_parameters(3, 0))]


@case
def broadcast_optimizer_state(hvd: Any) -> Any:
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad):
        model = torch.nn.Linear(3, 2)
        options = {"momentum": 0.5} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1), **options)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(hvd.rank()))
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 1)
        found.append([optimizer.param_groups[0]["lr"], _numbers(optimizer.state_dict()["state"])])
    lbfgs = torch.optim.LBFGS(torch.nn.Linear(1, 1).parameters())
    return [found, caught(lambda: hvd.broadcast_optimizer_state(lbfgs, 0))]


@case
def broadcast_optimizer_state_that_is_not_there(hvd: Any) -> Any:
    """The state of a step on zeros, and the zeros."""
    found = []
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ):
        for wrapped in (False, True):
            torch.manual_seed(hvd.rank())
            model = torch.nn.Linear(3, 2)
            frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
            before = [each.detach().clone() for each in model.parameters()]
            optimizer = kind([*model.parameters(), frozen], **options)
            if wrapped:
                named = [*model.named_parameters(), ("frozen", frozen)]
                optimizer = hvd.DistributedOptimizer(optimizer, named)
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert frozen.grad is None
            assert all(map(torch.equal, before, model.parameters()))
            found.append([each.grad.clone() for each in model.parameters()])
            found.append(_numbers(optimizer.state_dict()["state"]))
            hvd.broadcast_parameters(model.state_dict(), 0)
            model(torch.ones(1, 3)).sum().backward()  # on top of the zeros
            if wrapped:
                optimizer.step()
                found.append([each.grad.clone() for each in model.parameters()])
    return found


@case
def names_of_parameters(hvd: Any) -> Any:
    def named(model: torch.nn.Module, optimizer: Any) -> list[str]:
        return [optimizer._parameter_names[each] for each in model.parameters()]

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    groups = [{"params": each.parameters()} for each in model]
    unnamed = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    given = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    return [named(model, unnamed), named(model, given)]


@case
def objects(hvd: Any) -> Any:
    thing = {"rank": hvd.rank(), "list": [1, "two", None]}
    return [
        hvd.broadcast_object(thing, 1),
        hvd.broadcast_object(thing if hvd.rank() == 0 else None, name="one"),
        hvd.allgather_object((hvd.rank(), "x" * hvd.rank())),
    ]


def _train(hvd: Any, steps: int = 4, passes: int = 1, **options: Any) -> list[Tensor]:
    """Some steps of a small network, and its weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)
    )
    if options.pop("grouped", False):
        parameters = list(model.parameters())
        options["groups"] = [parameters[:2], parameters[3:4]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(5, 4, generator=generator)).pow(2).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    return [tensor.detach().clone() for tensor in model.parameters()]


@case
def distributed_optimizer(hvd: Any) -> Any:
    return [
        _train(hvd),
        _train(hvd, op=hvd.Sum),
        _train(hvd, passes=3),
        _train(hvd, groups=2),
        _train(hvd, grouped=True),
        _train(hvd, gradient_predivide_factor=2.0),
    ]


@case
def distributed_optimizer_refusals(hvd: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    named = list(model.named_parameters())

    def make(**options: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return caught(lambda: type(hvd.DistributedOptimizer(optimizer, **options)).__name__)

    return [
        make(),
        make(named_parameters=list(model.parameters())),
        make(named_parameters=[("w", named[0][1]), ("w", named[1][1])]),
        make(named_parameters=named[:1]),
        make(groups=-1),
        make(groups=[["no tensor"]]),
        make(groups=[[named[0][1]], [named[0][1]]]),
        make(backward_passes_per_step=0),
        make(op=hvd.Sum, gradient_predivide_factor=2.0),
    ]


@case
def sparse_gradients(hvd: Any) -> Any:
    found = []
    for dense in (False, True):
        torch.manual_seed(1)
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(
            optimizer, table.named_parameters(), sparse_as_dense=dense
        )
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), step])).sum().backward()
            optimizer.step()
        found.append(table.weight.detach().clone())
    return found


@case
def too_many_backward_passes(hvd: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    model(torch.ones(1, 2)).sum().backward()
    again = caught(lambda: model(torch.ones(1, 2)).sum().backward())
    optimizer.synchronize()
    return again


@case
def sync_batch_norm(hvd: Any) -> Any:
    layer = hvd.SyncBatchNorm(3, eps=1e-3, momentum=0.2)  # Horovod's computes on GPUs only
    return [caught(lambda: layer(values(hvd, 3))), sorted(layer.state_dict()), layer.eps]


@case
def elastic_state_and_sampler(hvd: Any) -> Any:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = hvd.elastic.ElasticSampler(range(11), shuffle=True, seed=3)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=hvd.rank(), batch=5
    )
    first = list(sampler)
    sampler.record_batch(0, 2)
    state.sync()
    synced = [state.epoch, state.batch, [p.clone() for p in model.parameters()]]
    state.epoch = 7
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    restored = [state.epoch, model.weight.clone()]
    state.epoch = 9
    state.commit()
    state.epoch = 10
    state.restore()
    sampler.set_epoch(1)
    return [first, len(sampler), list(sampler), synced, restored, state.epoch]


@case
def timeline(hvd: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        hvd.start_timeline(str(Path(folder) / "timeline.json"))
        hvd.allreduce(torch.ones(3), name="traced")
        hvd.stop_timeline()
        hvd.barrier()
        return (Path(folder) / "timeline.json").exists() or hvd.rank() > 0


@case
def process_sets(hvd: Any) -> Any:
    chosen = [0, hvd.size() - 1] if hvd.size() > 2 else [1]  # not the global set
    pair = hvd.add_process_set(chosen)
    included = pair.included()
    found = [included, pair.ranks, pair.size()]
    tensor = values(hvd, hvd.size() * 2)
    calls = {
        "allreduce": lambda: hvd.allreduce(tensor, process_set=pair),
        "allgather": lambda: hvd.allgather(tensor, process_set=pair),
        "broadcast": lambda: hvd.broadcast(tensor, hvd.size() - 1, process_set=pair),
        "alltoall": lambda: hvd.alltoall(tensor[:4], process_set=pair),
        "reducescatter": lambda: hvd.reducescatter(tensor, process_set=pair),
        "object": lambda: hvd.broadcast_object(hvd.rank(), 0, process_set=pair) if included else 0,
    }
    found += [caught(call) for call in calls.values()]
    if included:
        found += [pair.rank(), hvd.barrier(process_set=pair)]
        if hvd.size() > 2:
            found.append(caught(lambda: hvd.broadcast(tensor, 1, process_set=pair)))
    else:
        found.append(caught(pair.rank))
    hvd.barrier()
    found.append(caught(lambda: hvd.add_process_set(chosen)))
    found += [hvd.remove_process_set(pair), pair.process_set_id, hvd.remove_process_set(pair)]
    found += [hvd.remove_process_set(hvd.global_process_set), hvd.global_process_set.ranks]
    found.append(caught(lambda: hvd.allreduce(tensor, process_set=pair)))
    found.append(caught(lambda: hvd.ProcessSet(["a"])))
    return found


# From here on Horovod counts unnamed operations differently on different ranks.


@case
def a_name_in_use(hvd: Any) -> Any:
    if hvd.rank() == 0:
        first = hvd.allreduce_async(torch.ones(3), name="twice")
        second = caught(lambda: hvd.allreduce_async(torch.ones(3), name="twice"))
        hvd.barrier()
    else:
        hvd.barrier()
        first, second = hvd.allreduce_async(torch.ones(3), name="twice"), "raised ValueError"
    return [hvd.synchronize(first), second]


@case
def join_with_different_numbers_of_batches(hvd: Any) -> Any:
    sums = [
        hvd.allreduce(torch.ones(3), name=f"batch.{n}", op=hvd.Sum) for n in range(hvd.rank() + 1)
    ]
    last = hvd.join()
    return [len(sums), sums[0], last]


@case
def join_while_others_step(hvd: Any) -> Any:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(2 + hvd.rank()):
        optimizer.zero_grad()
        model(values(hvd, 5, 4)).square().sum().backward()
        optimizer.step()
    return [hvd.join(), *(parameter.detach() for parameter in model.parameters())]


@case
def after_shutdown(hvd: Any) -> Any:
    hvd.barrier()
    hvd.shutdown()
    return [
        hvd.is_initialized(),
        caught(hvd.rank),
        caught(hvd.size),
        caught(hvd.local_rank),
        caught(lambda: hvd.allreduce(torch.ones(2))),
        caught(lambda: hvd.broadcast(torch.ones(2), 0)),
    ]


def _numbers(result: Any) -> Any:
    """Tensors as lists, so that results compare."""
    if isinstance(result, Tensor):
        return (str(result.dtype), tuple(result.shape), result.detach().clone())
    if isinstance(result, dict):
        return {key: _numbers(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [_numbers(value) for value in result]
    return result


def same(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if exact and one.dtype != torch.float16:
            return torch.equal(one, other)
        tolerance = 3e-2 if one.dtype == torch.float16 else 1e-5
        return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            same(a, b, exact) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], exact) for k in one)
    return bool(one == other)


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import horovod.torch as theirs

    for package in (ours, theirs):
        Watched(package).init(process_sets="dynamic")
    exact = ours.size() == 2
    failures = []
    chosen = set(sys.argv[1:])
    for function in CASES:
        if chosen and function.__name__ not in chosen:
            continue
        messages.clear()
        mine = caught(lambda f=function: _numbers(f(Watched(ours))))
        expected = caught(lambda f=function: _numbers(f(Watched(theirs))))
        if not same(mine, expected, exact):
            failures.append(
                f"rank {theirs_rank}: {function.__name__}\n  {mine}\n  {expected}\n  {messages}"
            )
    if not chosen and (left := uncalled(theirs)):
        failures.append(f"no case calls {', '.join(left)}")
    for failure in failures:
        print(failure, flush=True)
    print(f"compared {len(CASES)} cases", flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    from mpi4py import MPI

    theirs_rank = MPI.COMM_WORLD.rank
    sys.exit(main())
