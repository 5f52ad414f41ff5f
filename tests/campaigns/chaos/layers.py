"""The layers of hsgd that cases are drawn from, and of its peers that are compared.

Owns the table: which program, on which nodes, and what its user is promised when a rank fails.
Never imports a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LAYERS", "Launch", "Layer"]

_ONE_NODE = ((0, 0), (0, 0, 0), (0, 0, 0, 0), (0,) * 6)
_IN_ORDER = ((0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 1, 2))
_NODES = (*_IN_ORDER, (0, 1, 0, 1))
_MPI_LAYOUTS = (*_ONE_NODE[:3], *_IN_ORDER)
_NEW = "SharedMemoryError"  # where a rank has no memory for a new array
_OWN = ("PeerLost", "CollectiveTimeout")


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
    layouts: tuple[tuple[int, ...], ...]
    about: str
    errors: tuple[str, ...] = _OWN
    goes_on: bool = False
    blames: Literal["all", "one", "none"] = "all"
    spared: tuple[str, ...] = ()
    steps: int = 150
    weight: int = 1
    is_peer: bool = False
    launch: Launch | None = None
    has_setup: bool = True


def _mpi_calls(
    name: str,
    layouts: tuple[tuple[int, ...], ...],
    about: str,
    launch: Launch,
    *,
    spared: tuple[str, ...] = (),
    is_peer: bool = False,
) -> Layer:
    """A program that calls MPI itself, whose errors name no rank."""
    return Layer(
        *(name, "mpi_programs:collectives", layouts, about),
        errors=("mpi4py.MPI.Exception",),
        blames="none",
        spared=spared,
        steps=600,
        is_peer=is_peer,
        launch=launch,
        has_setup=False,
    )


_ALL = (
    Layer("comm", "core_programs:blocking", _ONE_NODE + _NODES, "Comm, blocking", weight=3),
    Layer("async", "core_programs:asynchronous", _ONE_NODE + _NODES, "Comm, *_async", weight=2),
    Layer(
        "arrays",
        "core_programs:arrays",
        _ONE_NODE + _NODES,
        "Comm.empty and Comm.shared",
        (*_OWN, _NEW),
    ),
    Layer("split", "core_programs:split", _ONE_NODE + _NODES[2:], "Comm.split", blames="none"),
    Layer("window", "core_programs:window", _ONE_NODE + _NODES, "NotifiedWindow", blames="one"),
    Layer(
        "box", "core_programs:box", _ONE_NODE + _NODES, "ParameterBox", blames="one", goes_on=True
    ),
    Layer(
        "tree", "optim_programs:tree", _ONE_NODE + _NODES, "NotifiedTree", blames="one", steps=60
    ),
    Layer(
        "gossip",
        "optim_programs:gossip",
        _ONE_NODE + _NODES,
        "Gossip",
        blames="one",
        goes_on=True,
        steps=60,
    ),
    Layer(
        *("elastic", "optim_programs:elastic", _ONE_NODE + _NODES, "ElasticAveraging"),
        blames="one",
        goes_on=True,
        steps=60,
    ),
    Layer(
        "diloco",
        "optim_programs:diloco",
        _ONE_NODE + _NODES,
        "DiLoCo",
        (*_OWN, _NEW),
        steps=60,
    ),
    Layer(
        "ddp",
        "torch_programs:ddp",
        _ONE_NODE + _NODES,
        "DDP over backend hsgd",
        (*_OWN, _NEW),
        steps=60,
    ),
    Layer(
        "fsdp",
        "torch_programs:fsdp",
        _ONE_NODE + _NODES,
        "FSDP2 over backend hsgd",
        (*_OWN, _NEW),
        steps=30,
    ),
    Layer("c10d", "torch_programs:c10d", _ONE_NODE + _NODES, "torch.distributed's functions"),
    Layer(
        *("horovod", "torch_programs:horovod", _ONE_NODE, "hsgd.torch.DistributedOptimizer"),
        errors=(*_OWN, "HorovodInternalError"),
        blames="none",
        steps=60,
    ),
    Layer(
        *("horovod-apart", "torch_programs:apart", _ONE_NODE, "the same, gossip and easgd_*"),
        errors=(*_OWN, "HorovodInternalError"),
        blames="none",
        goes_on=True,
        steps=60,
    ),
    Layer("loader", "reader_programs:loader", _ONE_NODE + _NODES, "PartitionedLoader, node cache"),
    Layer(
        "mpi", "core_programs:blocking", _MPI_LAYOUTS, "Comm over MPI", weight=2, launch=Launch()
    ),
    Layer(
        *("mpi-async", "core_programs:asynchronous", _MPI_LAYOUTS, "Comm over MPI, *_async"),
        launch=Launch(),
    ),
    Layer(
        *("mpi-split", "core_programs:split", _MPI_LAYOUTS, "Comm.split over MPI"),
        blames="none",
        launch=Launch(),
    ),
    Layer(
        *("mpi-window", "core_programs:window", _MPI_LAYOUTS, "NotifiedWindow over MPI"),
        blames="one",
        launch=Launch(),
    ),
    _mpi_calls("interposer", _ONE_NODE[:3], "MPI's calls, taken, with ULFM", Launch(preload=True)),
    _mpi_calls(
        *("interposer-nodes", _IN_ORDER[1:3], "the same between nodes, where MPI keeps some calls"),
        Launch(preload=True),
        spared=("stop", "gil", "cut"),  # MPI has no deadline
    ),
    _mpi_calls(
        *("interposer-abort", _ONE_NODE[:3], "MPI's calls, taken, without ULFM"),
        Launch(lives_on=False, preload=True),
    ),
    _mpi_calls("ulfm", _MPI_LAYOUTS, "Open MPI's calls alone, ULFM", Launch(), is_peer=True),
    _mpi_calls(
        *("openmpi", _MPI_LAYOUTS, "Open MPI's calls alone"), Launch(lives_on=False), is_peer=True
    ),
    Layer(
        *("horovod-mpi", "mpi_programs:horovod", _MPI_LAYOUTS, "Horovod's allreduce over MPI"),
        errors=("HorovodInternalError",),
        blames="none",
        is_peer=True,
        has_setup=False,
        launch=Launch(lives_on=False),
    ),
    Layer(
        *("gloo", "torch_programs:gloo", _ONE_NODE, "torch.distributed's functions over gloo"),
        errors=("RuntimeError", "DistBackendError"),
        blames="none",
        is_peer=True,
    ),
    Layer(
        *("gloo-ddp", "torch_programs:gloo_ddp", _ONE_NODE, "DDP over gloo"),
        errors=("RuntimeError", "DistBackendError"),
        blames="none",
        steps=60,
        is_peer=True,
    ),
)

LAYERS = {layer.name: layer for layer in _ALL}
