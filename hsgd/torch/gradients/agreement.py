"""What ranks agree on before the buckets of an optimizer are made: the order of gradients, which of
them are sparse, and whether buckets travel during backward.

Owns the one exchange for it, and how parameters are divided into buckets. Never makes a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from hsgd.agree import agree as agree_on
from hsgd.comm import Comm
from hsgd.optim.layouts import strides_of
from hsgd.torch.exceptions import HorovodInternalError
from hsgd.torch.gradients.gradient_buckets import fill

__all__ = ["agree", "split"]

_MIB = 1 << 20


def agree(
    comm: Comm,
    names: Mapping[Tensor, str],
    overlap: str,
    terms: Mapping[str, object],
    *,
    sparse_as_dense: bool,
) -> tuple[list[Tensor], list[Tensor], str]:
    """Dense and sparse parameters in the order of the first rank, and its setting of the overlap;
    collective, blocking.

    names: of the parameters, in this rank's order. A parameter is sparse for all ranks where its
    gradient is on one. terms: other options that must be equal on all ranks, by name.
    Raises on all ranks: HorovodInternalError where parameters differ, SignatureMismatch where terms
    do.
    """
    own = [_describe(parameter, name, sparse_as_dense) for parameter, name in names.items()]
    layouts = comm.allgather_object((overlap, own), "optimizer layout")
    agree_on(comm, "DistributedOptimizer", lambda: terms)
    tables = [table for _, table in layouts]
    first = {name: (shape, dtype, strides) for name, shape, dtype, strides, _ in tables[0]}
    for rank, table in enumerate(tables):
        for name, shape, dtype, strides, _ in table:
            if first.get(name, ())[:2] != (shape, dtype):
                raise HorovodInternalError(
                    f"DistributedOptimizer: rank {rank} has parameter {name} of shape {shape} "
                    f"and {dtype}, rank 0 has {first.get(name, ('none of that name',))[:2]}; build "
                    "the same model on every rank"
                )
            if first[name][2] != strides:
                raise HorovodInternalError(
                    f"DistributedOptimizer: rank {rank} has parameter {name} with strides "
                    f"{strides}, rank 0 with {first[name][2]}; give the model the same memory "
                    "format on every rank"
                )
        if len(table) != len(first):
            absent = sorted(first.keys() - {name for name, *_ in table})
            raise HorovodInternalError(
                f"DistributedOptimizer: rank {rank} lacks the parameters {absent[:5]} of rank "
                "0; build the same model on every rank"
            )
    by_name = {name: parameter for parameter, name in names.items()}
    sparse = {name for table in tables for name, *_, sparse in table if sparse}
    order = [name for name, *_ in tables[0]]
    return (
        [by_name[name] for name in order if name not in sparse],
        [by_name[name] for name in order if name in sparse],
        layouts[0][0],
    )


def _describe(
    parameter: Tensor, name: str, sparse_as_dense: bool
) -> tuple[str, tuple[int, ...], str, tuple[int, ...], bool]:
    gradient = parameter.grad
    sparse = gradient is not None and gradient.is_sparse and not sparse_as_dense
    return name, tuple(parameter.shape), str(parameter.dtype), strides_of(parameter), sparse


def split(
    ordered: Sequence[Tensor], groups: int | list[list[Tensor]] | None, bucket_cap_mb: float
) -> list[list[Tensor]]:
    """The parameters of each bucket: by `groups`, as DistributedOptimizer takes it, or in order."""
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
