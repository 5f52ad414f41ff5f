"""Messages of CUDA tensors through host memory; they block the host, as gloo's do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsgd.c10d.point_to_point import PointToPoint
from hsgd.c10d.torch_versions import keep_from_dynamo

__all__ = ["DeviceMessages"]


@keep_from_dynamo
class _Arrival(dist.Work):
    """A message that is copied to the device after it arrived."""

    def __init__(self, message: Any, hosts: Sequence[Tensor], tensors: list[Tensor]) -> None:
        super().__init__()
        self._message, self._hosts, self._tensors = message, hosts, tensors
        self._copied = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message has arrived, and queue its copy; blocking."""
        self._message.wait(timeout)
        if not self._copied:
            self._copied = True
            for host, tensor in zip(self._hosts, self._tensors, strict=True):
                tensor.detach().copy_(host)
        return True

    def is_completed(self) -> bool:
        return bool(self._message.is_completed()) and self.wait()

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Wait for the message, and return a future that is done."""
        self.wait()
        future: Any = torch.futures.Future(devices=[self._tensors[0].device])
        future.set_result(self._tensors)
        return future

    def _source_rank(self) -> int:
        return int(self._message._source_rank())


class DeviceMessages:
    """Messages of one group, over those of its host tensors."""

    def __init__(self, messages: PointToPoint) -> None:
        self._messages = messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        """Copy to the host, blocking, and start sending to a group rank."""
        hosts = [tensor.detach().to("cpu") for tensor in tensors]
        return self._messages.send(hosts, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Start receiving from a group rank; not blocking."""
        hosts = _hosts(tensors)
        return _Arrival(self._messages.recv(hosts, source, tag), hosts, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Start receiving from the first rank that sends; not blocking."""
        hosts = _hosts(tensors)
        return _Arrival(self._messages.recv_anysource(hosts, tag), hosts, tensors)


def _hosts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
