"""FixedParameters: detects trained parameters that an optimizer does not exchange."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hsgd.optim.layouts import named_tensors

__all__ = ["FixedParameters"]

_REMEDY = "is never exchanged; do that before, or close this optimizer and make a new one"


class FixedParameters:
    """Records the parameters that `optimizer` trains now, to refuse later ones; local.

    Args:
        what: the name of the wrapper, for errors.
        params: the model, or the tensors that the user gave.
        exchanged: the tensors that are exchanged between ranks.
        stays: exchanged tensors that must not move in memory.
    """

    def __init__(
        self,
        what: str,
        optimizer: Optimizer,
        params: nn.Module | Sequence[Tensor],
        exchanged: Iterable[Tensor],
        stays: Iterable[Tensor] = (),
    ) -> None:
        self._what = what
        self._names = {tensor: name for name, tensor in named_tensors(params)}
        for number, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                self._names.setdefault(tensor, f"parameter {place} of group {number}")
        served = set(exchanged)
        others = [tensor for tensor in self._names if tensor not in served]
        self._frozen = [tensor for tensor in others if not tensor.requires_grad]
        self._stays = list(stays)
        self._addresses = [tensor.data_ptr() for tensor in self._stays]
        self._count = _count(optimizer)

    def named(self) -> list[tuple[str, Tensor]]:
        """Return all remembered tensors with their names for errors; local."""
        return [(name, tensor) for tensor, name in self._names.items()]

    def check(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError naming the first parameter that trains and is not exchanged; local."""
        if True in [tensor.requires_grad for tensor in self._frozen]:
            thawed = next(tensor for tensor in self._frozen if tensor.requires_grad)
            raise RuntimeError(
                f"{self._of(thawed)} was frozen when this optimizer was made, requires gradients "
                f"now, and {_REMEDY}"
            )
        if (count := _count(optimizer)) != self._count:
            raise RuntimeError(
                f"{self._what}: the wrapped optimizer has {count} parameters now, {self._count} "
                f"when it was wrapped; what is added {_REMEDY}"
            )
        here = [tensor.data_ptr() for tensor in self._stays]
        if here != self._addresses:
            places = zip(self._stays, self._addresses, strict=True)
            moved = next(tensor for tensor, address in places if tensor.data_ptr() != address)
            raise RuntimeError(
                f"{self._of(moved)} no longer lies in the memory that is exchanged; something "
                "assigned its .data (model.to(), .float()): do that before this optimizer is "
                "made, and write values with copy_()"
            )

    def _of(self, tensor: Tensor) -> str:
        return f"{self._what}: {self._names[tensor]}, shape {tuple(tensor.shape)},"


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
