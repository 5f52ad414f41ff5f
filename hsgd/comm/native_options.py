"""Translation of a Config into the core's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hsgd.config import Config

if TYPE_CHECKING:
    from hsgd import _native

__all__ = ["native_options"]

_WIRE_DTYPES = {"none": 0, "float16": 2, "bfloat16": 3}  # codes of hsgd_dtype
_STORES = {"ordinary": 0, "nontemporal": 1, "auto": 2}


def native_options(
    config: Config,
    rank_names: Sequence[int] | None = None,
    known: Mapping[str, int] | None = None,
) -> _native.Options:
    """Return the core's options for a communicator of this process; local.

    Errors call the ranks by `rank_names`, None: by their ranks in the communicator. `known`: what
    Comm.measured() returned for the same ranks, instead of new measurements; {} and None: nothing.
    """
    from hsgd import _native

    options = _native.Options()
    options.timeout_s = config.timeout_s
    options.oneshot_bytes = config.oneshot_bytes
    options.chunk_bytes = config.chunk_bytes
    options.wire_oneshot_bytes = config.wire_oneshot_bytes
    options.wire_chunk_bytes = config.wire_chunk_bytes
    options.wire_radix = config.wire_radix
    options.flat_ranks = config.flat_ranks
    options.near_nic = config.near_nic
    options.wire_dtype = _WIRE_DTYPES[config.wire_dtype]
    options.slots = config.slots
    options.spin = config.spin
    options.nontemporal = _STORES[config.store]
    for name, value in (known or {}).items():
        setattr(options, name, value)
    if rank_names is not None:
        options.rank_names = rank_names
    return options
