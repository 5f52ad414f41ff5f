"""Whether the ranks of a node have NCCL, and devices that it takes, so that these exchange by NCCL.

Owns the choice, which is the same on all ranks: they tell one another what they have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hsgd import _native
from hsgd.errors import HsgdError, about

if TYPE_CHECKING:
    from hsgd.comm.communicator import Comm
    from hsgd.config import Config

__all__ = ["DeviceLayout"]

_NCCL = "libnccl.so.2"  # torch's own where torch is loaded
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # of NCCL: "1" has ranks share devices
_CAN_SHARE = 23000  # from this version on, 2.30


class _Told(NamedTuple):
    """What a rank has. missing: why it has no NCCL. settings: those that all ranks must share."""

    uuid: bytes = b""
    broken: str = ""
    missing: str = ""
    version: int = 0
    may_share: bool = False
    settings: tuple[int, int] = (0, 0)


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
        version, missing = 0, "HSGD_NCCL_LIBRARY=none"
        if library != "none":  # on all ranks: each needs it
            version, missing = _attempt(lambda: _native.nccl_version(library))
        settings = config.device_chunk_bytes, config.slots
        may_share = os.environ.get(_SHARING) == "1"
        mine = _Told(uuid, broken, missing, version or 0, may_share, settings)
        # As plain tuples, which take a third of the bytes.
        told = [_Told(*each) for each in comm.allgather_object(tuple(mine), "devices")]
        _raise_if_any([each.broken for each in told])
        for rank, each in enumerate(told):
            if each.settings != told[0].settings:
                raise ValueError(
                    f"HSGD_DEVICE_CHUNK_BYTES and HSGD_SLOTS are {each.settings} on rank {rank} "
                    f"and {told[0].settings} on rank 0; give all ranks the same"
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


def _why_not(nodes: list[int], told: list[_Told]) -> str:
    """Why devices cannot exchange by NCCL; "" where they can."""
    sizes = {nodes.count(node) for node in nodes}
    if sizes == {1}:
        return "one rank per node"
    for rank, each in enumerate(told):
        if each.missing:
            return f"rank {rank}: {each.missing}"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for rank, node in enumerate(nodes):
        for other in range(rank):
            if nodes[other] == node and told[other].uuid == told[rank].uuid:
                refused = _why_not_shared(told)
                if refused:
                    return f"ranks {other} and {rank} share a device{refused}"
    return ""


def _why_not_shared(told: list[_Told]) -> str:
    """Why NCCL would refuse ranks that share a device; "" where it does not."""
    for rank, each in enumerate(told):
        if not each.may_share:
            return f" (NCCL 2.30 allows it with {_SHARING}=1, which rank {rank} has not)"
    oldest = min(each.version for each in told)
    if oldest < _CAN_SHARE:
        return f", which NCCL allows from 2.30 on ({oldest} is here)"
    return ""
