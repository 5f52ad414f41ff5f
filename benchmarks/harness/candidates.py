"""What can be measured: the table of candidates and of the worker jobs that they live in.

bindings.py holds the Python side of each, native/ the C side; what is named here is not imported.
To add a candidate, add a line here and a binding there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.layouts import JobLayout  # not at run time: workers may have no hsgd beside them

__all__ = ["CANDIDATES", "HOROVOD_CYCLE_S", "JOBS", "MPICH_YIELDS", "Candidate", "Job", "select"]

ALL = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier")
SHARED = ALL[:-1]  # that need no staging on shared buffers
OPERATORS = ("allreduce", "allgather")
HOROVOD_CYCLE_S = 1e-3  # HOROVOD_CYCLE_TIME as it comes, for Horovod with and without hsgd


@dataclass(frozen=True)
class Job:
    """Worker processes that some candidates share, started by one mpirun."""

    name: str
    native: bool = False  # the C program instead of worker.py
    peer: str | None = None  # that peers.py installs: mpich, impi, oneccl, deepspeed or vllm
    pauses: bool = False  # threads of its own wake up: stopped while another job is measured
    environment: dict[str, str] = field(default_factory=dict)
    crowded: dict[str, str] = field(default_factory=dict)  # as well when ranks outnumber cores
    interface_variable: str | None = None  # tells the network between the nodes, here "lo"


@dataclass(frozen=True)
class Candidate:
    """One way to do a collective."""

    name: str  # on the command line and in the JSON
    job: str
    label: str  # in the table and the plot
    kind: str  # "hsgd", "peer" or "limit"
    about: str
    binding: str = ""  # who does it inside the job, where that has another name
    collectives: tuple[str, ...] = ("allreduce",)
    in_place: bool = False  # allreduce's input is its output: filled again before each batch
    least_bytes: int = 0
    most_bytes: int | None = None
    nodes: str = "any"  # "one" or "several"
    crowded: bool = True  # also measured when ranks outnumber cores
    only_named: bool = False  # measured where a benchmark or the command line names it
    cycle_s: float = 0.0  # it answers in steps of this length: see EPILOG in command.py

    @property
    def does(self) -> str:
        """The name that the worker knows."""
        return self.binding or self.name

    def fits(self, layout: JobLayout, collective: str, nbytes: int) -> bool:
        """Whether it is measured in this case."""
        return (
            collective in self.collectives
            and self.least_bytes <= nbytes
            and (self.most_bytes is None or nbytes <= self.most_bytes)
            and self.fits_layout(layout)
        )

    def fits_layout(self, layout: JobLayout) -> bool:
        """Whether it is measured there at all."""
        nodes = "one" if layout.nodes == 1 else "several"
        return self.nodes in ("any", nodes) and (self.crowded or not layout.crowded)


MPICH_YIELDS = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
}
# Intel's library yields as it comes; WAIT_MODE=1 and SPIN_COUNT differ by less than two runs do.
INTEL_MPI = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}  # without libfabric; unbound as the others
INTEL_MPI_YIELDS = {"I_MPI_THREAD_YIELD": "2"}
# Its worker threads would want as many cores again: with them a call takes 13 us to 84 ms.
ONECCL = {"CCL_ATL_TRANSPORT": "mpi", "CCL_WORKER_OFFLOAD": "0"}
ONECCL_YIELDS = {"CCL_YIELD": "sched_yield", "CCL_SPIN_COUNT": "1"}
JOBS = (
    Job("native", native=True),
    Job("native-bf16", native=True, environment={"HSGD_WIRE_DTYPE": "bfloat16"}),
    Job("native-sm", native=True, environment={"OMPI_MCA_coll_sm_priority": "100"}),
    Job("native-flat", native=True, environment={"OMPI_MCA_coll_han_priority": "0"}),
    Job("native-mpich", native=True, peer="mpich", crowded=MPICH_YIELDS),
    Job("native-impi", native=True, peer="impi", environment=INTEL_MPI, crowded=INTEL_MPI_YIELDS),
    Job(
        *("native-oneccl", True, "oneccl"),
        environment={**INTEL_MPI, **ONECCL},
        crowded={**INTEL_MPI_YIELDS, **ONECCL_YIELDS},
    ),
    Job("native-deepspeed", native=True, peer="deepspeed"),
    Job("python"),
    Job("tcp", interface_variable="HSGD_INTERFACES"),
    Job("python-mpich", peer="mpich", crowded=MPICH_YIELDS),
    Job("python-impi", peer="impi", environment=INTEL_MPI, crowded=INTEL_MPI_YIELDS),
    Job("gloo", interface_variable="GLOO_SOCKET_IFNAME"),
    Job("vllm", peer="vllm"),
    Job("horovod", pauses=True),
    Job("horovod-plugin", pauses=True, environment={"HOROVOD_PLUGIN": "hsgd-mpi"}),
)

CANDIDATES = (
    Candidate("hsgd-c", "native", "hsgd (C)", "hsgd", collectives=ALL,
              about="hsgd_comm_allreduce and its like, called from C, private buffers"),
    Candidate("hsgd-arena-c", "native", "arena (C)", "hsgd", collectives=SHARED,
              about="the same, both buffers from hsgd_comm_allocate"),
    Candidate("hsgd-bf16-c", "native-bf16", "bf16 (C)", "hsgd", binding="hsgd-c", nodes="several",
              about="hsgd_comm_allreduce with HSGD_WIRE_DTYPE=bfloat16: rounded between nodes"),
    Candidate("mpi-c", "native", "MPI (C)", "peer", collectives=ALL,
              about="PMPI_Allreduce and its like in that C program; Open MPI as it comes, which "
              "is HAN between nodes with several ranks"),
    # it spins
    Candidate("mpi-sm-c", "native-sm", "MPI sm (C)", "peer",
              binding="mpi-c", collectives=ALL, nodes="one", crowded=False,
              about="the same with coll_sm_priority 100: Open MPI's collectives in shared memory"),
    Candidate("mpi-flat-c", "native-flat", "MPI flat (C)", "peer",
              binding="mpi-c", collectives=ALL, nodes="several",
              about="the same with coll_han_priority 0: without HAN"),
    Candidate("mpich-c", "native-mpich", "MPICH (C)", "peer", binding="mpi-c", collectives=ALL,
              about="PMPI_Allreduce and its like of MPICH, in the same C program"),
    # the wheel has no libfabric
    Candidate("impi-c", "native-impi", "Intel MPI (C)", "peer",
              binding="mpi-c", collectives=ALL, nodes="one",
              about="the same program, compiled with MPICH's headers, over Intel MPI"),
    Candidate("oneccl", "native-oneccl", "oneCCL (C)", "peer", collectives=ALL, nodes="one",
              about="ccl::allreduce and its like of oneCCL's CPU library, in the same program "
              "over Intel MPI"),
    # it spins for ever
    Candidate("deepspeed", "native-deepspeed", "DeepSpeed", "peer",
              in_place=True, nodes="one", crowded=False,
              about="all_reduce_outer_loop of DeepSpeed's csrc/cpu/comm/shm.cpp, called from C, "
              "in place"),
    Candidate("limit-line", "native", "limit", "limit", most_bytes=512, nodes="one", crowded=False,
              about="one transfer in a ping-pong of as many cache lines, between two cores"),
    # below, waiting for the other core decides, not memory traffic
    Candidate("limit", "native", "limit", "limit", least_bytes=16 << 10, nodes="one",
              about="the least loads and stores of a staged allreduce, all ranks at once, "
              "without waiting"),
    Candidate("limit-past", "native", "limit past", "limit", least_bytes=1 << 20, nodes="one",
              about="the same, results stored past the cache"),
    Candidate("limit-arena", "native", "arena limit", "limit", least_bytes=16 << 10, nodes="one",
              about="the least loads and stores when both buffers lie in shared memory"),
    Candidate("limit-arena-past", "native", "arena past", "limit", least_bytes=1 << 20, nodes="one",
              about="the same, stored past the cache"),
    Candidate("limit-link", "native", "limit", "limit", least_bytes=64 << 10, nodes="several",
              about="2 (nodes - 1) / nodes of the bytes over TCP from each node to the next, "
              "all at once"),
    Candidate("hsgd", "python", "hsgd", "hsgd", collectives=ALL,
              about="hsgd.Comm.allreduce(array, out=result)"),
    Candidate("hsgd-arena", "python", "arena", "hsgd", collectives=SHARED,
              about="the same, both arrays from hsgd.Comm.empty"),
    Candidate("hsgd-tcp", "tcp", "hsgd, TCP", "hsgd", collectives=ALL, nodes="several",
              about="the same over TCP between nodes, without MPI: Comm.over_store"),
    Candidate("mpi4py", "python", "mpi4py", "peer", collectives=ALL,
              about="MPI.COMM_WORLD.Allreduce(array, result) and its like, Open MPI as it comes"),
    Candidate("mpich", "python-mpich", "MPICH", "peer", binding="mpi4py", collectives=ALL,
              about="the same over MPICH"),
    Candidate("impi", "python-impi", "Intel MPI", "peer",
              binding="mpi4py", collectives=ALL, nodes="one",
              about="the same over Intel MPI"),
    Candidate("gloo", "gloo", "gloo", "peer", collectives=ALL, in_place=True,
              about="torch.distributed.all_reduce(tensor) and its like"),
    Candidate("hsgd-c10d", "gloo", "c10d", "hsgd", collectives=ALL, in_place=True,
              about='the same in a group of backend "hsgd"'),
    Candidate("gloo-bf16", "gloo", "gloo bf16", "peer",
              collectives=OPERATORS, in_place=True, only_named=True,
              about="torch.distributed.all_reduce and all_gather_into_tensor of bfloat16, as "
              "many bytes"),
    Candidate("hsgd-c10d-bf16", "gloo", "c10d bf16", "hsgd",
              collectives=OPERATORS, in_place=True, only_named=True,
              about='the same in a group of backend "hsgd"'),
    Candidate("hsgd-operator", "gloo", "operator", "hsgd",
              collectives=OPERATORS, in_place=True, only_named=True,
              about="torch.ops.hsgd.allreduce_(tensor, ...) and allgather_into"),
    Candidate("vllm", "vllm", "vLLM", "peer",
              collectives=OPERATORS, in_place=True, nodes="one", crowded=False, only_named=True,
              about="vLLM's torch.ops._C.shm_allreduce and shm_all_gather, from its wheel for "
              "CPUs"),
    Candidate("vllm-bf16", "vllm", "vLLM bf16", "peer",
              collectives=OPERATORS, in_place=True, nodes="one", crowded=False, only_named=True,
              about="the same of bfloat16, as many bytes"),
    Candidate("horovod", "horovod", "Horovod", "peer", in_place=True, cycle_s=HOROVOD_CYCLE_S,
              about="horovod.torch.allreduce_(tensor, name=..., op=Sum)"),
    Candidate("horovod-plugin", "horovod-plugin", "Horovod+hsgd-mpi", "hsgd",
              in_place=True, cycle_s=HOROVOD_CYCLE_S,
              about="the same with HOROVOD_PLUGIN=hsgd-mpi: the interposer under Horovod"),
)  # fmt: skip


def select(names: Sequence[str], collectives: Sequence[str]) -> tuple[Candidate, ...]:
    """The named candidates that do one of the collectives, in the order of the table; for no names
    all of these but those that must be named. Raises ValueError.
    """
    known = {c.name: c for c in CANDIDATES if set(c.collectives) & set(collectives)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no candidate {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(c for c in known.values() if c.name in names or not (names or c.only_named))
