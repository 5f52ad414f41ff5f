"""The process group of backend "hsgd"; messages go over gloo, other devices to torch's backends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BarrierOptions

from hsgd.c10d import NAME, preemptible_group, torch_versions
from hsgd.c10d.collectives import Collectives
from hsgd.c10d.devices.accelerators import Accelerators
from hsgd.c10d.devices.device_messages import DeviceMessages
from hsgd.c10d.diagnostics import flight_recorder
from hsgd.c10d.point_to_point import PointToPoint
from hsgd.c10d.routes import by_device
from hsgd.c10d.torch_versions import keep_from_dynamo
from hsgd.config import Config
from hsgd.errors import HsgdError
from hsgd.optim.replicas.guarded_ddp import guard_all

__all__ = ["HsgdProcessGroup"]

_MESSAGES = ("send", "recv", "recv_anysource")
preemptible_group.register()


@keep_from_dynamo
class HsgdProcessGroup(Collectives):
    """Group of init_process_group("hsgd") and new_group; collective over its ranks, blocking.

    Raises CollectiveTimeout, which names ranks that do not make the call.

    Args:
        options: those of torch's extended backend interface.
        backend_options: `pg_options` of the caller, for the accelerator's backend.
    """

    def __init__(self, options: Any, backend_options: Any = None) -> None:
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        place = options.store, options.group_id, options.group_rank
        super().__init__(*place, members, options.timeout)
        one_node = self._comm.cross_size == 1
        self._messages: PointToPoint | None = PointToPoint(self._board, local=one_node)
        self._accelerators = Accelerators(options, backend_options, members)
        self._name = self._description = ""
        if Config.from_env().check_replicas == "1":
            guard_all()
        self._default_backend = flight_recorder.name_backend(self)

    # Methods that torch calls.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *map(torch.device, self._accelerators.configured(self))]

    def _get_backend(self, device: torch.device) -> Any:
        device = torch.device(device)
        if device.type == "cpu":
            return self
        group = self._accelerators.group(self, device)
        return group if isinstance(group, Collectives) else group._get_backend(device)

    def get_group_store(self) -> Any:
        return self._board.store

    def _set_sequence_number_for_group(self) -> None:
        pass  # the core numbers its collectives itself

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set it for accelerators; ValueError if it differs from the group's, which is fixed."""
        self._accelerators.set_timeout(timeout)
        if timeout.total_seconds() != self._limit_s:
            raise ValueError(
                f"set_timeout: the group was made with {self._limit_s:g} s, which cannot change; "
                "give timeout= to init_process_group or new_group"
            )

    def shutdown(self) -> None:
        self._accelerators.shutdown()
        self._messages = None
        super().shutdown()

    def abort(self) -> None:
        self._accelerators.abort()
        super().abort()

    def group_for(self, device: torch.device, method: str) -> Any:
        """Return the backend that was configured for the device; ValueError if there is none."""
        if method in _MESSAGES and self._accelerators.is_own(self, device):
            return DeviceMessages(self._checked_messages())
        return self._accelerators.group(self, device)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called this; errors name all ranks that did not."""
        opts = BarrierOptions()
        torch_versions.make_blocking(opts)
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # Messages between two ranks.

    def _checked_messages(self) -> PointToPoint:
        if self._messages is None:
            raise HsgdError(f"{NAME}: the process group was destroyed; make a new one")
        return self._messages

    @by_device
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._checked_messages().send(tensors, to, tag)

    @by_device
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._checked_messages().recv(tensors, source, tag)

    @by_device
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._checked_messages().recv_anysource(tensors, tag)
