"""A process group that torch made with gloo, whose collectives on CPU tensors hsgd serves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsgd.c10d import preemptible_group
from hsgd.c10d.collectives import Collectives
from hsgd.c10d.diagnostics.call_counts import CallCounts
from hsgd.c10d.routes import by_device
from hsgd.c10d.torch_versions import keep_from_dynamo

__all__ = ["GlooGroup"]
preemptible_group.register()


@keep_from_dynamo
class GlooGroup(Collectives):
    """Replacement of `underneath`, which torch made over gloo; collective to construct, blocking.

    `members` are global ranks, by group rank; `counts` counts all calls, if given. Raises
    CollectiveTimeout, which names ranks that do not make the call.
    """

    _traced_as, _traced_threaded = "gloo", True  # gloo's works end in a thread of gloo

    def __init__(
        self,
        underneath: dist.ProcessGroup,
        store: Any,
        members: list[int],
        timeout: timedelta,
        counts: CallCounts | None,
    ) -> None:
        super().__init__(store, underneath.group_name, underneath.rank(), members, timeout)
        self._underneath = underneath
        gloo: Any = underneath._get_backend(torch.device("cpu"))
        self._gloo_options = gloo.options
        self._counts = counts
        self._take_over(underneath)

    def _take_over(self, underneath: Any) -> None:
        """Copy the backends, names and device of the group underneath, for torch's C++ code."""
        for device in underneath._device_types:
            backend = underneath._get_backend(device)
            self._register_backend(device, _kind(backend._get_backend_name()), backend)
        default = _kind(underneath._get_backend_name())
        # torch forgets it for "cpu:gloo" if it knows a plugin.
        unknown = default == dist.ProcessGroup.BackendType.UNDEFINED
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO if unknown else default)
        self._set_group_name(underneath.group_name)
        self._set_group_desc(underneath.group_desc)
        if underneath.bound_device_id is not None:
            self.bound_device_id = underneath.bound_device_id

    # Methods that torch calls.

    def getBackendName(self) -> str:
        return str(self._underneath._get_backend_name())

    def get_group_store(self) -> Any:
        return self._board.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls; hsgd does not exceed the group's first timeout."""
        self._underneath.set_timeout(timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self._underneath.shutdown()

    # Division of the work.

    def _note(self, what: str, given: Sequence[Tensor]) -> None:
        if self._counts is not None:
            self._counts.add(True, what, given)

    def _limit_now(self) -> float:
        """Return the group's limit, or gloo's timeout, which torch changes, if that is less."""
        gloos_s: float = self._gloo_options._timeout.total_seconds()
        return min(self._limit_s, gloos_s)

    def _is_unwatched(self) -> bool:
        is_plain = self._counts is None and super()._is_unwatched()
        return is_plain and self._limit_now() >= self._limit_s

    def group_for(self, device: torch.device, method: str) -> Any:
        return self._left(f"{method} on {device.type}", [])

    def split_group(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(
            "split_group: not with HSGD_AS_GLOO=1; use new_group, without device_id="
        )

    merge_remote_group = split_group

    def _left(self, what: str, tensors: list[Tensor]) -> Any:
        if self._counts is not None:
            self._counts.add(False, what, tensors)
        return self._underneath

    def monitored_barrier(self, *arguments: Any, **named: Any) -> None:
        """Call gloo's, whose messages say which rank did not call which barrier."""
        self._left("monitored_barrier", []).monitored_barrier(*arguments, **named)

    @by_device
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._left("send", tensors).send(tensors, to, tag)

    @by_device
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._left("recv", tensors).recv(tensors, source, tag)

    @by_device
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._left("recv_anysource", tensors).recv_anysource(tensors, tag)


def _kind(name: str) -> Any:
    kinds = dist.ProcessGroup.BackendType
    return getattr(kinds, name.upper(), kinds.CUSTOM)
