"""The layers of hsgd that cases are drawn from, and of its peers that are compared.

Owns the table: which program, on which nodes, and what its user is promised when a rank fails.
Never imports a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["LAYERS", "Launch", "Layer"]

_ONE_NODE = ((0, 0), (0, 0, 0), (0, 0, 0, 0), (0,) * 6)
_IN_ORDER = ((0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 2))
_NODES = (*_IN_ORDER, (0, 1, 0, 1))
_MPI_LAYOUTS = (*_ONE_NODE[:3], *_IN_ORDER)
_OWN = ("PeerLost", "CollectiveTimeout")
_OR_NEW = (*_OWN, "SharedMemoryError")  # where a rank has no memory for a new array
_ON_ONE_NODE: dict[str, Any] = {"layouts": _ONE_NODE, "blames": "none"}
_HOROVOD = {**_ON_ONE_NODE, "errors": (*_OWN, "HorovodInternalError")}
_GLOO = {**_ON_ONE_NODE, "errors": ("RuntimeError", "DistBackendError"), "is_peer": True}


@dataclass(frozen=True)
class Launch:
    """How mpirun starts the ranks of a layer.

    lives_on: with ULFM, so that ranks outlive one that dies; else mpirun ends all of them.
    preload: with the interposer, which takes all calls that it can.
    """

    lives_on: bool = True
    preload: bool = False


@dataclass(frozen=True)
class Layer:
    """What a program of ranks uses.

    program: module and function in campaigns.chaos. layouts: the node of each rank, to choose
    from. errors: what ranks may raise when another one fails. goes_on: ranks need not fail at all
    then. blames: of those that do, "all" name the rank; or at least "one", where others know their
    neighbours only; or "none". spared: faults that mean nothing here. has_setup: whether ranks meet
    by hsgd's own steps; the set-up of others has no faults. launch: of those that need MPI; None:
    of the others.
    """

    name: str
    program: str
    about: str
    layouts: tuple[tuple[int, ...], ...] = _ONE_NODE + _NODES
    errors: tuple[str, ...] = _OWN
    goes_on: bool = False
    blames: Literal["all", "one", "none"] = "all"
    spared: tuple[str, ...] = ()
    steps: int = 150
    weight: int = 1
    is_peer: bool = False
    launch: Launch | None = None
    has_setup: bool = True


def _trains(name: str, program: str, about: str, steps: int = 60, **more: Any) -> Layer:
    """Make the layer of a program that trains, whose steps take longer."""
    return Layer(name, program, about, steps=steps, **more)


def _over_mpi(name: str, program: str, about: str, **more: Any) -> Layer:
    """Make the layer of a program over the core that mpirun starts."""
    return Layer(name, f"core_programs:{program}", about, _MPI_LAYOUTS, launch=Launch(), **more)


def _mpi_calls(
    name: str,
    about: str,
    layouts: tuple[tuple[int, ...], ...],
    launch: Launch,
    program: str = "collectives",
    errors: tuple[str, ...] = ("mpi4py.MPI.Exception",),
    **more: Any,
) -> Layer:
    """Make the layer of a program that calls MPI itself, whose errors name no rank."""
    whole = f"mpi_programs:{program}"
    promises: dict[str, Any] = {"errors": errors, "blames": "none", "has_setup": False}
    return Layer(name, whole, about, layouts, launch=launch, **{"steps": 600, **promises, **more})


_ALL = (
    Layer("comm", "core_programs:blocking", "Comm, blocking", weight=3),
    Layer("async", "core_programs:asynchronous", "Comm, *_async", weight=2),
    Layer("arrays", "core_programs:arrays", "Comm.empty and Comm.shared", errors=_OR_NEW),
    Layer("split", "core_programs:split", "Comm.split", _ONE_NODE + _NODES[2:], blames="none"),
    Layer("window", "core_programs:window", "NotifiedWindow", blames="one"),
    Layer("box", "core_programs:box", "ParameterBox", blames="one", goes_on=True),
    _trains("tree", "optim_programs:tree", "NotifiedTree", blames="one"),
    _trains("gossip", "optim_programs:gossip", "Gossip", blames="one", goes_on=True),
    _trains("elastic", "optim_programs:elastic", "ElasticAveraging", blames="one", goes_on=True),
    _trains("diloco", "optim_programs:diloco", "DiLoCo", errors=_OR_NEW),
    _trains("ddp", "torch_programs:ddp", "DDP over backend hsgd", errors=_OR_NEW),
    _trains("fsdp", "torch_programs:fsdp", "FSDP2 over backend hsgd", 30, errors=_OR_NEW),
    Layer("c10d", "torch_programs:c10d", "torch.distributed's functions"),
    _trains("horovod", "torch_programs:horovod", "hsgd.torch.DistributedOptimizer", **_HOROVOD),
    _trains(
        *("horovod-apart", "torch_programs:apart", "the same, gossip and easgd_*"),
        goes_on=True,
        **_HOROVOD,
    ),
    Layer("loader", "reader_programs:loader", "PartitionedLoader, node cache"),
    _over_mpi("mpi", "blocking", "Comm over MPI", weight=2),
    _over_mpi("mpi-async", "asynchronous", "Comm over MPI, *_async"),
    _over_mpi("mpi-split", "split", "Comm.split over MPI", blames="none"),
    _over_mpi("mpi-window", "window", "NotifiedWindow over MPI", blames="one"),
    _mpi_calls("interposer", "MPI's calls, taken, with ULFM", _ONE_NODE[:3], Launch(preload=True)),
    _mpi_calls(
        *("interposer-nodes", "the same between nodes, where MPI keeps some calls", _IN_ORDER[1:3]),
        Launch(preload=True),
        spared=("stop", "gil", "cut"),  # MPI has no deadline
    ),
    _mpi_calls(
        *("interposer-abort", "MPI's calls, taken, without ULFM", _ONE_NODE[:3]),
        Launch(lives_on=False, preload=True),
    ),
    _mpi_calls("ulfm", "Open MPI's calls alone, ULFM", _MPI_LAYOUTS, Launch(), is_peer=True),
    _mpi_calls("openmpi", "Open MPI's calls alone", _MPI_LAYOUTS, Launch(False), is_peer=True),
    _mpi_calls(
        *("horovod-mpi", "Horovod's allreduce over MPI", _MPI_LAYOUTS, Launch(False), "horovod"),
        errors=("HorovodInternalError",),
        steps=150,
        is_peer=True,
    ),
    Layer("gloo", "torch_programs:gloo", "torch.distributed's functions over gloo", **_GLOO),
    _trains("gloo-ddp", "torch_programs:gloo_ddp", "DDP over gloo", **_GLOO),
)

LAYERS = {layer.name: layer for layer in _ALL}
