"""Agreement of ranks before buckets are made: order, sparsity and overlap of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from hsgd.comm.agree import agree as agree_on
from hsgd.comm.communicator import Comm
from hsgd.optim.layouts import strides_of
from hsgd.torch.gradients.gradient_buckets import fill

__all__ = ["agree", "split"]

_MIB = 1 << 20
_OVERLAPS = ("auto", "always", "never")
_WHAT = "DistributedOptimizer"
_REMEDY = "build the same model, in the same memory format, on every rank"


def agree(
    comm: Comm,
    names: Mapping[Tensor, str],
    overlap: str,
    terms: Mapping[str, object],
    *,
    sparse_as_dense: bool,
) -> tuple[list[Tensor], list[Tensor], str]:
    """Return dense and sparse parameters in the first rank's order, and its overlap setting.

    Collective, blocking; sends about 5 bytes per parameter, for any number of ranks. A parameter is
    sparse on all ranks if its gradient is on one. `names` is in this rank's order; `terms` are
    other options that must be equal. Raises SignatureMismatch on all ranks if terms or parameters
    differ.
    """
    agree_on(comm, _WHAT, lambda: terms)
    table = {f"parameter {name}": _describe(each) for each, name in names.items()}
    agree_on(comm, _WHAT, lambda: table, _REMEDY)
    by_name = sorted(names, key=names.__getitem__)  # equal on all ranks
    places = {parameter: place for place, parameter in enumerate(by_name)}
    first = np.array([_OVERLAPS.index(overlap), *(places[each] for each in names)], np.int32)
    comm.broadcast(first, name="optimizer order")
    sparse = np.array([_is_sparse(each) and not sparse_as_dense for each in by_name], np.uint8)
    comm.allreduce(sparse, "max", sparse, "sparse gradients")
    chosen, *order = first.tolist()
    return (
        [by_name[place] for place in order if not sparse[place]],
        [by_name[place] for place in order if sparse[place]],
        _OVERLAPS[chosen],
    )


def _describe(parameter: Tensor) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(parameter.shape)}, strides {strides_of(parameter)}"


def _is_sparse(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def split(
    ordered: Sequence[Tensor], groups: int | list[list[Tensor]] | None, bucket_cap_mb: float
) -> list[list[Tensor]]:
    """Return the parameters of each bucket, by DistributedOptimizer's `groups` or in order."""
    parts: list[list[Tensor]] = [list(ordered)]
    most = int(bucket_cap_mb * _MIB)
    if isinstance(groups, int):
        each, more = divmod(len(ordered), groups)
        ends = [n * each + min(n, more) for n in range(groups + 1)]
        parts = [list(ordered[a:b]) for a, b in itertools.pairwise(ends)]
        most = 1 << 62
    elif groups is not None:
        chosen = {parameter: n for n, group in enumerate(groups) for parameter in group}
        parts = [[p for p in ordered if chosen.get(p) == n] for n in range(len(groups))]
        parts += [[p] for p in ordered if p not in chosen]
        most = 1 << 62
    buckets = []
    for part in parts:
        sizes = [((p.dtype, p.device), p.numel() * p.element_size()) for p in part]
        buckets += [[part[n] for n in indices] for indices in fill(sizes, most)]
    return buckets
