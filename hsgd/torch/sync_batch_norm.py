"""SyncBatchNorm: batch normalization over the batches of all ranks.

Source: Ioffe and Szegedy, "Batch Normalization", arXiv:1502.03167; moments of parts are joined as
in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hsgd.torch.collectives.allgather import allgather
from hsgd.torch.collectives.allreduce import allreduce
from hsgd.torch.job import horovod_path, runtime
from hsgd.torch.operations.reductions import SUM

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d with the moments of all ranks in training; collective.

    Arguments are those of torch.nn.BatchNorm2d; inputs are (batch, channels, ...) and may have
    different batch sizes on different ranks. Gradients of weight and bias are this rank's own, for
    DistributedOptimizer to reduce. In float32 and float64; Horovod's takes tensors on GPUs only.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalize a batch; collective and blocking in training."""
        batch = input
        self._check_input_dim(batch)
        local = not self.training and self.track_running_stats
        if local or runtime.current().comm.size == 1:
            return super().forward(batch)
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if batch.device.type not in ("cpu", "cuda"):
            horovod = horovod_path.for_device(batch.device, "SyncBatchNorm")
            function = horovod.sync_batch_norm._SyncBatchNorm
        else:
            function = _SyncBatchNorm
        output: Tensor = function.apply(
            batch,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.eps,
            self._rate(),
        )
        return output

    def _rate(self) -> float:
        """Return the weight of new moments in the running ones."""
        if self.momentum is not None:
            return self.momentum
        return (
            1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        )


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        rate: float,
    ) -> Tensor:
        count, mean, variance = _moments(batch)
        scale = torch.rsqrt(variance + eps)
        if running_mean is not None and running_var is not None:
            unbiased = variance * (count / max(count - 1, 1))
            running_mean.lerp_(mean.to(running_mean.dtype), rate)
            running_var.lerp_(unbiased.to(running_var.dtype), rate)
        mean, scale = mean.to(batch.dtype), scale.to(batch.dtype)
        ctx.save_for_backward(batch, weight, mean, scale)
        ctx.count = count
        normalized = (batch - _along(mean, batch)) * _along(scale, batch)
        if weight is not None:
            normalized = normalized * _along(weight, batch)
        return normalized if bias is None else normalized + _along(bias, batch)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        batch, weight, mean, scale = ctx.saved_tensors
        gradient = gradients[0]
        axes = [0, *range(2, batch.dim())]
        normalized = (batch - _along(mean, batch)) * _along(scale, batch)
        of_bias = gradient.sum(axes)
        of_weight = (gradient * normalized).sum(axes)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = allreduce(torch.stack([of_bias, of_weight]), op=SUM) / ctx.count
            shift, slope = _along(sums[0], batch), _along(sums[1], batch)
            factor = scale if weight is None else scale * weight
            of_input = (gradient - shift - normalized * slope) * _along(factor, batch)
        return (
            of_input,
            of_weight if weight is not None and ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
            None,
        )


def _moments(batch: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return count, mean and biased variance per channel over all ranks; collective, blocking."""
    axes = [0, *range(2, batch.dim())]
    own_count = batch.numel() // batch.shape[1]
    wide = batch.detach().double()
    own_mean = wide.mean(axes) if own_count else wide.new_zeros(batch.shape[1])
    own_square = ((wide - _along(own_mean, wide)) ** 2).sum(axes)
    counts = torch.full_like(own_mean, own_count)
    parts = allgather(torch.stack([counts, own_mean, own_square])[None])
    count = parts[:, 0].sum(0)
    mean = (parts[:, 0] * parts[:, 1]).sum(0) / count
    square = parts[:, 2].sum(0) + (parts[:, 0] * (parts[:, 1] - mean) ** 2).sum(0)
    return float(count[0]), mean, square / count


def _along(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (like.dim() - 2))
