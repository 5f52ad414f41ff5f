"""Agreement of ranks on arguments before they begin: all return, or all raise."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping

import numpy as np

from hsgd.comm.communicator import Comm
from hsgd.errors import HsgdError, SignatureMismatch, about

__all__ = ["agree", "digest_of"]

_DIGEST_BYTES = 7  # an int64 holds them with either sign
_ABSENT = "absent"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object without a __str__ of its own
_SHOWN = 120  # characters of a value
_TOLD = "what differs"


def agree(
    comm: Comm,
    what: str,
    terms: Callable[[], Mapping[str, object]],
    remedy: str = "give the same on every rank",
) -> None:
    """Return if all ranks have valid and equal terms; collective, blocking.

    It costs one allreduce of 24 bytes, for any number of terms and ranks. `terms` is called once.
    It returns values by name, which are compared as text, and raises if arguments of this rank
    cannot work. Errors begin with `what` and end with `remedy`.

    Raises:
        Exception: on the rank that terms() refused, its error; on the others HsgdError with that
            rank and its reason.
        SignatureMismatch: on all ranks; names the first term that differs, two ranks, both values.
    """
    refusal: Exception | None = None
    own: dict[str, str] = {}
    try:
        own = _texts(terms())
    except Exception as error:  # of any kind: the others wait for the outcome
        refusal = error
    digest = _digest(own)
    place = 0 if refusal is None else comm.size - comm.rank  # the lowest rank that refuses counts
    every = np.array([digest, -digest, place], np.int64)
    most, least, first = comm.allreduce(every, "max", name=f"terms of {what}").tolist()
    if first:
        _raise_refusal(comm, what, comm.size - first, refusal)
    if most != -least:
        _raise_difference(comm, what, own, remedy)


def digest_of(values: Mapping[str, object]) -> int:
    """Return a number from 0 to 2^56 - 1, equal if agree() finds terms equal, else hardly ever."""
    return _digest(_texts(values))


def _digest(texts: Mapping[str, str]) -> int:
    packed = json.dumps(texts, sort_keys=True)
    octets = hashlib.blake2b(packed.encode(), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(octets, "little")


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: _ADDRESS.sub("", str(value)) for name, value in values.items()}


def _raise_refusal(comm: Comm, what: str, rank: int, refusal: Exception | None) -> None:
    """Raise this rank's own refusal, or that of `rank`; collective."""
    line = str(refusal).partition("\n")[0].removeprefix(f"{what}: ")
    line = comm.broadcast_object(line, rank, _TOLD)
    if refusal is not None:
        raise refusal
    raise about(rank, HsgdError(f"{what}: rank {rank} refused its arguments: {line}"))


def _raise_difference(comm: Comm, what: str, own: Mapping[str, str], remedy: str) -> None:
    """Raise SignatureMismatch about the first rank that differs from rank 0; collective."""
    first: Mapping[str, str] = comm.broadcast_object(own, 0, _TOLD)
    here = [n for n in _merged(own, first) if own.get(n, _ABSENT) != first.get(n, _ABSENT)]
    mine = np.array([comm.rank if here else comm.size], np.int64)
    other = int(comm.allreduce(mine, "min", name=f"who differs in {what}")[0])
    differing = (here[0], own.get(here[0], _ABSENT)) if here else None
    name, value = comm.broadcast_object(differing, other, _TOLD)
    error = SignatureMismatch(
        f"{what}: {name} is {value[:_SHOWN]} on rank {other}, {first.get(name, _ABSENT)[:_SHOWN]} "
        f"on rank 0; {remedy}"
    )
    error.ranks, error.rank = (0, other), other
    raise error


def _merged(*orders: Mapping[str, str]) -> list[str]:
    """Return the names of all orders, at their earliest place; those that one lacks come first."""
    places: dict[str, int] = {}
    for order in orders:
        for place, name in enumerate(order):
            places[name] = min(place, places.get(name, place))
    return sorted(places, key=lambda name: (places[name], all(name in order for order in orders)))
