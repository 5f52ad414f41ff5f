"""What ranks that make a ParameterBox together must have in common, compared before it is made.

Owns the one exchange of terms. Never makes anything, so that a rank that is refused leaves nothing
behind, and all ranks come out of it alike: with an error, or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hsgd.comm import Comm
from hsgd.errors import HsgdError, SignatureMismatch, about

__all__ = ["agree"]

_WORDS = 160  # bytes of a rank's terms
_REFUSED = "refused"


def agree(comm: Comm, initial: Any, check: Callable[[], None], more: Sequence[object]) -> None:
    """Return when all ranks have valid and equal terms; collective, blocking.

    initial: values whose size and dtype count. check: raises for arguments of this rank that cannot
    work. more: what else is equal on all ranks.
    Raises on all ranks: what check() raises on the rank that it refuses, HsgdError naming that rank
    on others; SignatureMismatch naming two ranks that differ; TypeError for another dtype than
    float32.
    """
    refusal: Exception | None = None
    dtype, words = "", _REFUSED
    try:
        check()
        dtype, count = _form_of(initial)
        words = ", ".join(map(str, (f"{count} {dtype}", *more)))
    except Exception as error:  # of whatever kind: the others wait for the outcome
        refusal = error
    own = np.zeros((1, _WORDS), np.uint8)
    encoded = words.encode()[:_WORDS]
    own[0, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    everybodys = comm.allgather(own, name="terms of a ParameterBox")
    if refusal is not None:
        raise refusal
    terms = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in everybodys]
    if _REFUSED in terms:
        rank = terms.index(_REFUSED)
        raise about(
            rank,
            HsgdError(f"ParameterBox.over: rank {rank} refused its arguments; see what it says"),
        )
    _compare(terms)
    if dtype != "float32":
        raise TypeError(f"ParameterBox.over: the initial values are {dtype}; give float32")


def _compare(terms: Sequence[str]) -> None:
    other = next((rank for rank, words in enumerate(terms) if words != terms[0]), None)
    if other is None:
        return
    error = SignatureMismatch(
        f"ParameterBox.over: rank 0 gave {terms[0]}, rank {other} gave {terms[other]}; "
        "give the same on every rank"
    )
    error.ranks, error.rank = (0, other), other
    raise error


def _form_of(array: Any) -> tuple[str, int]:
    """Dtype and number of values of a NumPy array, a torch tensor, or what NumPy takes."""
    if hasattr(array, "numel"):
        return str(array.dtype).removeprefix("torch."), int(array.numel())
    taken = np.asarray(array)
    return str(taken.dtype), int(taken.size)
