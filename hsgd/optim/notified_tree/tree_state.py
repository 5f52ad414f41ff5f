"""Gathering and dividing optimizer state of layers whose roots are on several nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hsgd.comm.communicator import Comm

__all__ = ["gather_state", "part_of_rank_0"]

_NAME = "state of NotifiedTree, which all ranks get or load together"


def gather_state(comm: Comm, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state of all ranks' parameters, with this rank's options; collective, blocking."""
    merged: dict[Any, Any] = {}
    for state in comm.allgather_object(state_dict["state"], _NAME):
        merged.update(state)
    return {**state_dict, "state": dict(sorted(merged.items()))}


def part_of_rank_0(
    comm: Comm, state_dict: dict[str, Any], owned: Collection[int]
) -> dict[str, Any]:
    """Return rank 0's dictionary, with state of the numbered parameters; collective, blocking."""
    first: dict[str, Any] = comm.broadcast_object(state_dict, 0, _NAME)
    state = {number: values for number, values in first["state"].items() if number in owned}
    return {**first, "state": state}
