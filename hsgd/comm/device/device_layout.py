"""DeviceLayout: the choice, equal on all ranks, whether devices of a node exchange data by NCCL."""

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

_NCCL = "libnccl.so.2"  # torch's own if torch is loaded
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's variable: "1" lets ranks share devices
_CAN_SHARE = 23000  # NCCL 2.30 or newer


class _Told(NamedTuple):
    """Facts of one rank.

    Attributes:
        missing: why it has no NCCL.
        settings: values that must be equal on all ranks.
    """

    uuid: bytes = b""
    broken: str = ""
    missing: str = ""
    version: int = 0
    may_share: bool = False
    settings: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class DeviceLayout:
    """How devices exchange data.

    Attributes:
        nccl_library: NCCL for the devices of one node; "" if they exchange through host memory.
        nccl_id: NCCL's unique id for the communicator of this node.
        reason: why NCCL is not used.
    """

    nccl_library: str = ""
    nccl_id: bytes = b""
    reason: str = ""

    @classmethod
    def agreed(cls, comm: Comm, config: Config, ordinal: int) -> DeviceLayout:
        """Choose; collective over `comm`, blocking. Raises ValueError if settings differ."""
        library = _NCCL if config.nccl_library == "auto" else config.nccl_library
        uuid, broken = _attempt(lambda: _native.device_uuid(config.cuda_library, ordinal))
        version, missing = 0, "HSGD_NCCL_LIBRARY=none"
        if library != "none":  # on all ranks, as each needs it
            version, missing = _attempt(lambda: _native.nccl_version(library))
        settings = config.device_chunk_bytes, config.slots
        may_share = os.environ.get(_SHARING) == "1"
        mine = _Told(uuid, broken, missing, version or 0, may_share, settings)
        # Plain tuples take a third of the bytes.
        told = [_Told(*each) for each in comm.allgather_object(tuple(mine), "devices")]
        names = comm.rank_names
        _raise_if_any(names, [each.broken for each in told])
        for name, each in zip(names, told, strict=True):
            if each.settings != told[0].settings:
                raise ValueError(
                    f"HSGD_DEVICE_CHUNK_BYTES and HSGD_SLOTS are {each.settings} on rank {name} "
                    f"and {told[0].settings} on rank {names[0]}; give all ranks the same"
                )
        reason = _why_not(comm.nodes, names, told)
        if reason:
            return cls(reason=reason)
        nccl_id, broken = b"", ""
        if comm.local_rank == 0:
            nccl_id, broken = _attempt(lambda: _native.new_nccl_id(library))
        ids = comm.allgather_object((nccl_id, broken), "NCCL")
        _raise_if_any(names, [failed for _, failed in ids])
        first = comm.nodes.index(comm.cross_rank)
        return cls(library, ids[first][0])


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return (the result of `call`, ""), or (b"", the text of its HsgdError).

    It must not raise here: the other ranks wait in the next allgather.
    """
    try:
        return call(), ""
    except HsgdError as error:
        return b"", str(error)


def _raise_if_any(names: list[int], failures: list[str]) -> None:
    for name, failure in zip(names, failures, strict=True):
        if failure:
            raise about(name, HsgdError(f"rank {name}: {failure}"))


def _why_not(nodes: list[int], names: list[int], told: list[_Told]) -> str:
    sizes = {nodes.count(node) for node in nodes}
    if sizes == {1}:
        return "one rank per node"
    for name, each in zip(names, told, strict=True):
        if each.missing:
            return f"rank {name}: {each.missing}"
    if len(sizes) > 1:
        return "nodes have different numbers of ranks"
    for rank, node in enumerate(nodes):
        for other in range(rank):
            if nodes[other] == node and told[other].uuid == told[rank].uuid:
                refused = _why_not_shared(names, told)
                if refused:
                    return f"ranks {names[other]} and {names[rank]} share a device{refused}"
    return ""


def _why_not_shared(names: list[int], told: list[_Told]) -> str:
    """Return why NCCL refuses ranks that share a device; "" if it does not."""
    for name, each in zip(names, told, strict=True):
        if not each.may_share:
            return f" (NCCL 2.30 allows it with {_SHARING}=1, which rank {name} has not)"
    oldest = min(each.version for each in told)
    if oldest < _CAN_SHARE:
        return f", which NCCL allows from 2.30 on ({oldest} is here)"
    return ""
