"""The strategies of DistributedOptimizer that are algorithms of hsgd.optim, with builders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.comm.communicator import Comm
from hsgd.jobs.environment.agent_link import link
from hsgd.optim.diloco.diloco_optimizer import DiLoCo
from hsgd.optim.elastic_averaging.easgd_optimizer import ElasticAveraging, Mode
from hsgd.optim.gossip.gossip_optimizer import Gossip
from hsgd.optim.node_shared.node_shared_optimizer import NodeSharedOptimizer, SharedParameters
from hsgd.optim.notified_tree.notified_tree_optimizer import NotifiedTree
from hsgd.optim.optimizer_ranks import weakly
from hsgd.optim.restartable_optimizer import RestartableOptimizer
from hsgd.torch.compression import Compression, Compressor
from hsgd.torch.exceptions import core_errors_as_horovods
from hsgd.torch.job import runtime
from hsgd.torch.job.process_sets import global_process_set
from hsgd.torch.operations.reductions import AVERAGE

__all__ = [
    "BUCKET_CAP_MB",
    "STRATEGIES",
    "Request",
    "Strategy",
    "refuse_options",
    "share_optimizer",
    "share_parameters",
    "start_strategy",
]

_Restartable = TypeVar("_Restartable", bound=RestartableOptimizer)
Strategy = Literal[
    "auto",
    "overlap",
    "after_backward",
    "notified_tree",
    "gossip",
    "diloco",
    "easgd_async",
    "easgd_hybrid",
]
"""Names that DistributedOptimizer accepts; from the fourth on those of the table below."""

BUCKET_CAP_MB = 25.0
_NEUTRAL = {
    "op": AVERAGE,
    "compression": Compression.none,
    "backward_passes_per_step": 1,
    "gradient_predivide_factor": 1.0,
    "groups": None,
    "sparse_as_dense": False,
    "process_set": global_process_set,
    "node_shared": False,
    "bucket_cap_mb": BUCKET_CAP_MB,
}
"""DistributedOptimizer's arguments about gradients, and the values that change nothing."""


@dataclass(frozen=True)
class Request:
    """The arguments of DistributedOptimizer; `transport` has those of _NEUTRAL."""

    optimizer: Optimizer
    strategy: str
    model: nn.Module | None
    named_parameters: Iterable[tuple[str, Tensor]] | None
    options: dict[str, Any] | None
    transport: dict[str, Any]

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def averaged(self) -> nn.Module | list[Any]:
        """The model, whose floating buffers are averaged as well, or else the parameters."""
        return self.parameters if self.model is None else self.model

    def changed(self) -> list[str]:
        """Return the arguments about gradients that differ from those in _NEUTRAL; local."""
        return [name for name, value in self.transport.items() if value != _NEUTRAL[name]]


class _Algorithm(NamedTuple):
    """A strategy of the table.

    Attributes:
        build: makes the optimizer from the request and keywords; collective, blocking.
        wires: the `compression` keyword for each compressor.
        remedies: by argument that cannot be given, what to do instead.
    """

    build: Callable[..., Any]
    wires: Mapping[type[Compressor], str | None] = {Compression.none: None}
    has_options: bool = True
    remedies: Mapping[str, str] = {}


def start_strategy(request: Request) -> Any:
    """Make the optimizer of a strategy of the table; collective, blocking.

    In an elastic job, before the function of elastic.run, it is local for DiLoCo and Gossip; the
    elastic state then gives them their ranks. Raises ValueError for arguments without meaning.
    """
    algorithm, strategy = STRATEGIES[request.strategy], request.strategy
    if not algorithm.has_options:
        refuse_options(strategy, request.options)
    compression = request.transport["compression"]
    for name in request.changed():
        value = request.transport[name]
        if name == "op":
            raise ValueError(f'strategy="{strategy}" averages; op is {value}, give Average')
        if name != "compression" or value not in algorithm.wires:
            remedy = algorithm.remedies.get(name, "leave it out")
            raise ValueError(
                f'strategy="{strategy}" does not know {name}={value!r}; {remedy}, or use another '
                "strategy"
            )
    options = dict(request.options or {})
    if (wire := algorithm.wires[compression]) is not None:
        options.setdefault("compression", wire)
    return algorithm.build(request, **options)


def refuse_options(strategy: str, options: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a strategy without options is given some; local."""
    if options is not None:
        having = ", ".join(name for name, each in STRATEGIES.items() if each.has_options)
        raise ValueError(f'strategy_options are for {having}; strategy is "{strategy}"')


# --- one builder for each algorithm ---


def _notified_tree(request: Request) -> NotifiedTree:
    model = request.model
    if model is None:
        raise ValueError(
            'strategy="notified_tree" needs model=: modules wait for their weights, and named '
            "parameters do not tell which modules they belong to"
        )
    own = set(model.parameters())
    for name, parameter in request.named_parameters or ():
        if parameter not in own:
            raise ValueError(
                f'strategy="notified_tree": the named parameter "{name}" is not one of model\'s'
            )
    return NotifiedTree(request.optimizer, model, runtime.current().private_comm(0, "tree"))


def _gossip(request: Request, **options: Any) -> Gossip:
    if request.model is not None:
        buffers = [b for b in request.model.buffers() if b.is_floating_point()]
        options.setdefault("buffers", buffers)
    comm = _ranks_of_job("gossip")
    return _end_with_job(Gossip(request.optimizer, request.parameters, comm, **options))


def _diloco(request: Request, **options: Any) -> DiLoCo:
    comm = _ranks_of_job("diloco")
    return _end_with_job(DiLoCo(request.optimizer, request.averaged, comm, **options))


def _elastic_averaging(mode: Mode) -> Callable[..., ElasticAveraging]:
    def build(request: Request, **options: Any) -> ElasticAveraging:
        comm = runtime.current().private_comm(0, "elastic averaging")
        return ElasticAveraging(request.optimizer, request.averaged, comm, mode, **options)

    return build


STRATEGIES: dict[str, _Algorithm] = {
    "notified_tree": _Algorithm(
        _notified_tree, has_options=False, remedies={"backward_passes_per_step": "use no_sync()"}
    ),
    "gossip": _Algorithm(
        _gossip, {Compression.none: None, Compression.fp16: "float16", Compression.bf16: "bfloat16"}
    ),
    "diloco": _Algorithm(_diloco, {Compression.none: None, Compression.bf16: "bfloat16"}),
    "easgd_async": _Algorithm(_elastic_averaging("async")),
    "easgd_hybrid": _Algorithm(_elastic_averaging("hybrid")),
}


def _ranks_of_job(what: str) -> Comm | None:
    """Return a communicator for one optimizer; collective, blocking.

    Returns None, local, in an elastic job before the function of elastic.run.
    """
    agent = link()
    alone = agent is not None and not agent.is_training
    return None if alone else runtime.current().private_comm(0, what)


def _end_with_job(optimizer: _Restartable) -> _Restartable:
    """Return the optimizer, held weakly; its waits end with the world of an elastic job; local."""
    if link() is not None:
        runtime.current().on_abort.append(weakly(optimizer.abort, None))
    return optimizer


# --- node_shared=True ---


def share_parameters(model: nn.Module, root_rank: int = 0) -> SharedParameters:
    """Make a model's parameters views of memory that a node shares; collective, blocking.

    All ranks get the root's values. DistributedOptimizer(node_shared=True) does it for its
    optimizer's parameters. For writes to them and for errors see hsgd.optim.share_parameters.
    """
    return _share(model.parameters(), root_rank)


class _SharedOptimizer(NodeSharedOptimizer):
    """A NodeSharedOptimizer whose collectives raise HorovodInternalError, except ReplicasDiffer."""

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        return core_errors_as_horovods()


def share_optimizer(request: Request) -> NodeSharedOptimizer:
    """Make the optimizer of DistributedOptimizer(node_shared=True); collective, blocking.

    backward_passes_per_step is ignored; model and named_parameters give names for errors. Raises
    ValueError if the optimizer cannot be sharded, or an argument has no meaning with it.
    """
    refuse_options(request.strategy, request.options)
    taken = ("node_shared", "sparse_as_dense", "backward_passes_per_step")
    refused = [name for name in request.changed() if name not in taken]
    refused += ["strategy"] if request.strategy == "overlap" else []
    if refused:
        raise ValueError(
            f"node_shared: {', '.join(sorted(refused))} cannot be given; gradients are averaged "
            "over all ranks as they are, after the backward pass, and there are no buckets"
        )
    NodeSharedOptimizer.check_kind(request.optimizer)
    model, named = request.model, request.named_parameters or ()
    names = {p: name for name, p in (named if model is None else model.named_parameters())}
    sparse_as_dense = request.transport["sparse_as_dense"]
    shared = _share(request.parameters, 0)
    return _SharedOptimizer(request.optimizer, shared, sparse_as_dense=sparse_as_dense, names=names)


def _share(parameters: Iterable[Any], root: int) -> SharedParameters:
    return SharedParameters(
        parameters, runtime.current().private_comm(0, "shared parameters"), root
    )
