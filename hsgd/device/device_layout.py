"""Whether the ranks of a node have a CUDA device each, and NCCL, so that devices exchange by NCCL.

Owns the choice, which is the same on all ranks: they tell one another what they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsgd import _native
from hsgd.errors import HsgdError, about

if TYPE_CHECKING:
    from hsgd.comm import Comm
    from hsgd.config import Config

__all__ = ["DeviceLayout"]

_NCCL = "libnccl.so.2"  # torch's own where torch is loaded


@dataclass(frozen=True)
class DeviceLayout:
    """How devices exchange.

    nccl_library: of the devices of one node; "" where they exchange through host memory.
    nccl_id: what NCCL's communicator of this node is made of.
    reason: why not by NCCL.
    """

    nccl_library: str = ""
    nccl_id: bytes = b""
    reason: str = ""

    @classmethod
    def agreed(cls, comm: Comm, config: Config, ordinal: int) -> DeviceLayout:
        """Collective over `comm`, blocking. Raises ValueError where ranks have other settings."""
        library = _NCCL if config.nccl_library == "auto" else config.nccl_library
        uuid, broken = _attempt(lambda: _native.device_uuid(config.cuda_library, ordinal))
        missing = "HSGD_NCCL_LIBRARY=none"
        if library != "none":  # on all ranks: each needs it
            missing = _attempt(lambda: _native.find_nccl(library))[1]
        settings = config.device_chunk_bytes, config.slots
        told = comm.allgather_object((uuid, missing, settings, broken), "devices")
        _raise_if_any([failed for *_, failed in told])
        for rank, (_, _, others, _) in enumerate(told):
            if others != told[0][2]:
                raise ValueError(
                    f"HSGD_DEVICE_CHUNK_BYTES and HSGD_SLOTS are {others} on rank {rank} and "
                    f"{told[0][2]} on rank 0; give all ranks the same"
                )
        reason = _why_not(comm.nodes, told)
        if reason:
            return cls(reason=reason)
        nccl_id, broken = b"", ""
        if comm.local_rank == 0:
            nccl_id, broken = _attempt(lambda: _native.new_nccl_id(library))
        ids = comm.allgather_object((nccl_id, broken), "NCCL")
        _raise_if_any([failed for _, failed in ids])
        first = comm.nodes.index(comm.cross_rank)  # the node's first rank
        return cls(library, ids[first][0])


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or what it fails with: the other ranks wait to be told."""
    try:
        return call(), ""
    except HsgdError as error:
        return b"", str(error)


def _raise_if_any(failures: list[str]) -> None:
    """Raise on all ranks what one has failed with."""
    for rank, failure in enumerate(failures):
        if failure:
            raise about(rank, HsgdError(f"rank {rank}: {failure}"))


def _why_not(nodes: list[int], told: list[tuple[bytes, str, Any, str]]) -> str:
    """Why devices cannot exchange by NCCL; "" where they can."""
    sizes = {nodes.count(node) for node in nodes}
    if sizes == {1}:
        return "one rank per node"
    for rank, (_, missing, _, _) in enumerate(told):
        if missing:
            return f"rank {rank}: {missing}"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for rank, node in enumerate(nodes):
        for other in range(rank):
            if nodes[other] == node and told[other][0] == told[rank][0]:
                return f"ranks {other} and {rank} share a device"
    return ""
