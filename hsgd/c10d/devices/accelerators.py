"""Tensors of other devices in a group like "cpu:hsgd,cuda:nccl": torch's backends serve them.

torch makes no further backend once it has a ProcessGroup written in Python. So the first tensor of
a device makes its backend here, in an inner ProcessGroup, within a collective that all ranks call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hsgd.c10d import NAME

__all__ = ["Accelerators"]


class Accelerators:
    """The backends of a group for devices other than the CPU."""

    def __init__(self, options: Any, backend_options: Any, members: list[int]) -> None:
        self._options, self._backend_options, self._members = options, backend_options, members
        self._group: dist.ProcessGroup | None = None
        self._own: Any = None  # hsgd's own, for CUDA
        self._made: set[str] = set()

    def configured(self, owner: dist.ProcessGroup) -> dict[str, str]:
        """Return the requested backend names by device type; local."""
        if owner not in dist.distributed_c10d._world.pg_backend_config:
            return {}
        text = dist.get_backend_config(owner)
        found = dist.distributed_c10d.BackendConfig(dist.Backend(text)).get_device_backend_map()
        return {device: str(name) for device, name in found.items() if device != "cpu"}

    def group(self, owner: dist.ProcessGroup, device: torch.device) -> Any:
        """Return the ProcessGroup for tensors of `device`; ValueError if none was requested."""
        if self.is_own(owner, device):
            return self._own_group()
        name = self.configured(owner).get(device.type)
        if name is None:
            raise ValueError(
                f"the process group has no backend for {device.type} tensors; use "
                f'init_process_group("cpu:hsgd,{device.type}:nccl"), without device_id, or for '
                'CUDA "cpu:hsgd,cuda:hsgd"'
            )
        if self._group is None:
            options = self._options
            self._group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        if device.type not in self._made:
            backend, kind = self._backend(device.type, name)
            self._group._set_default_backend(kind)
            self._group._register_backend(torch.device(device.type), kind, backend)
            self._group._set_group_name(owner.group_name)
            self._made.add(device.type)
        return self._group

    def is_own(self, owner: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether hsgd itself handles tensors of `device`; local."""
        return device.type == "cuda" and self.configured(owner).get(device.type) == NAME

    def _own_group(self) -> Any:
        if self._own is None:
            from hsgd.c10d.devices.device_collectives import DeviceCollectives

            options = self._options
            place = options.store, options.group_id, options.group_rank
            self._own = DeviceCollectives(*place, self._members, options.timeout)
        return self._own

    def _backend(self, device: str, name: str) -> tuple[Any, Any]:
        options, kinds = self._options, dist.ProcessGroup.BackendType
        store = PrefixStore(f"hsgd/{device}", options.store)
        rank, size, limit = options.group_rank, options.group_size, options.timeout
        if name == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, timeout=limit), kinds.GLOO
        if name == "nccl":
            if not dist.is_nccl_available():
                raise ValueError(f"{device}:nccl: this build of torch has no NCCL")
            given = self._backend_options or dist.ProcessGroupNCCL.Options()
            given._timeout = limit
            given.global_ranks_in_group = options.global_ranks_in_group
            given.group_name = options.group_id
            return dist.ProcessGroupNCCL(store, rank, size, given), kinds.NCCL
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is None or plugin.extended_api:
            raise ValueError(f"{device}:{name} cannot be combined with hsgd; use {device}:nccl")
        return plugin.creator_fn(store, rank, size, limit), kinds.CUSTOM

    def set_timeout(self, limit: timedelta) -> None:
        """Set a new time limit in the backends that exist; local."""
        if self._group is not None:
            self._group.set_timeout(limit)

    def abort(self) -> None:
        """Make running collectives of hsgd's own CUDA group fail at once; local."""
        if self._own is not None:
            self._own.abort()
            self._own = None

    def shutdown(self) -> None:
        """Close the backends that exist; local."""
        if self._own is not None:
            self._own.shutdown()
            self._own = None
        if self._group is not None:
            self._group.shutdown()
            self._group = None
            self._made.clear()
