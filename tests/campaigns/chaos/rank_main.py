"""A rank of a case, from its order to its end, however its process was started.

Owns what is told of it: what its program raised, or a wrong result. Never ends the process.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from typing import Any

from campaigns.chaos.seat import Seat, WrongResult

__all__ = ["be_rank"]


def be_rank(order: dict[str, Any]) -> None:
    """Run the program that is ordered; raises what it raises."""
    output = os.open(f"{order['folder']}/output-{order['rank']}", os.O_WRONLY | os.O_CREAT, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if order["cores"]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["cores"]])
    seat = Seat(order)
    module, name = order["program"].split(":")
    try:
        program = getattr(importlib.import_module(f"campaigns.chaos.{module}"), name)
        program(seat)
    except WrongResult as error:
        seat.say("wrong", text=str(error))
        raise
    except BaseException as error:
        seat.say("error", kind=_kinds(error), text=str(error), rank=_rank_of(error))
        raise
    seat.say("done")


def _kinds(error: BaseException) -> list[str]:
    """Its classes by their names, with and without their modules."""
    kinds = type(error).__mro__
    whole = (f"{each.__module__}.{each.__name__}" for each in kinds)
    return [*(each.__name__ for each in kinds), *whole]


def _rank_of(error: BaseException) -> int:
    found = getattr(error, "rank", -1)
    cause = error.__cause__
    return _rank_of(cause) if found == -1 and cause is not None else int(found)
