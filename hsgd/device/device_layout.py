"""Whether the ranks of a node have a CUDA device each, and NCCL, so that devices exchange by NCCL.

Owns the choice, which is the same on all ranks: they tell one another what they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsgd import _native
from hsgd.errors import HsgdError

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
        uuid, missing = _native.device_uuid(config.cuda_library, ordinal), ""
        if library == "none":
            missing = "HSGD_NCCL_LIBRARY=none"
        else:
            try:  # on all ranks: each needs it
                _native.find_nccl(library)
            except HsgdError as error:
                missing = str(error)
        settings = config.device_chunk_bytes, config.slots
        told = comm.allgather_object((uuid, missing, settings), "devices")
        for rank, (_, _, others) in enumerate(told):
            if others != told[0][2]:
                raise ValueError(
                    f"HSGD_DEVICE_CHUNK_BYTES and HSGD_SLOTS are {others} on rank {rank} and "
                    f"{told[0][2]} on rank 0; give all ranks the same"
                )
        reason = _why_not(comm.nodes, told)
        if reason:
            return cls(reason=reason)
        nccl_id = _native.new_nccl_id(library) if comm.local_rank == 0 else b""
        ids = comm.allgather_object(nccl_id, "NCCL")
        first = comm.nodes.index(comm.cross_rank)  # the node's first rank
        return cls(library, ids[first])


def _why_not(nodes: list[int], told: list[tuple[bytes, str, Any]]) -> str:
    """Why devices cannot exchange by NCCL; "" where they can."""
    sizes = {nodes.count(node) for node in nodes}
    if sizes == {1}:
        return "one rank per node"
    for rank, (_, missing, _) in enumerate(told):
        if missing:
            return f"rank {rank}: {missing}"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for rank, node in enumerate(nodes):
        for other in range(rank):
            if nodes[other] == node and told[other][0] == told[rank][0]:
                return f"ranks {other} and {rank} share a device"
    return ""
