"""A rank of a job, from its order to its end, however its process was started.

    python -m campaigns.run_rank ORDER

Owns what is told of it: what its program raised, or a wrong result. Over MPI it also ends the
process: where ranks outlive one that died, without MPI_Finalize, which may wait for the dead
(docs/faults.md); else an exception ends the job, as under python -m mpi4py.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from campaigns.seat import WrongResult

__all__ = ["run_rank"]

_LATER_S = 1.5  # past its deadline a rank may wait for another node to name who is late


def run_rank(order: dict[str, Any]) -> None:
    """Run the program that is ordered; raises what it raises."""
    output = os.open(f"{order['folder']}/output-{order['rank']}", os.O_WRONLY | os.O_CREAT, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.environ["TMPDIR"] = order["folder"]
    seat = _named(order["seat"])(order)
    try:
        _named(order["program"])(seat)
    except WrongResult as error:
        seat.say("wrong", text=str(error)[:10_000])
        raise
    except BaseException as error:
        seat.say("error", kind=_kinds(error), text=str(error)[:10_000], rank=_rank_of(error))
        raise
    seat.say("done", **seat.report())


def _named(place: str) -> Any:
    """Something in a module of campaigns, named as "chaos.core_programs:window"."""
    module, name = place.split(":")
    return getattr(importlib.import_module(f"campaigns.{module}"), name)


def _kinds(error: BaseException) -> list[str]:
    """Its classes by their names, with and without their modules."""
    kinds = type(error).__mro__
    whole = (f"{each.__module__}.{each.__name__}" for each in kinds)
    return [*(each.__name__ for each in kinds), *whole]


def _rank_of(error: BaseException) -> int:
    found = getattr(error, "rank", -1)
    cause = error.__cause__
    return _rank_of(cause) if found == -1 and cause is not None else int(found)


def _run_under_mpi(order: dict[str, Any]) -> None:
    from mpi4py import MPI  # a death in MPI_Init is MPI's own affair

    try:
        run_rank(order)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if not order["outlives"]:
            MPI.COMM_WORLD.Abort(1)
        if order["has_deadlines"]:
            _let_others_tell(order)
        os._exit(1)
    if order["outlives"]:
        os._exit(0)


def _let_others_tell(order: dict[str, Any]) -> None:
    """Wait until all but the victim have an error. mpirun may end the others when this rank ends
    with an exit code, and the controller would not see that one of them waits for ever.
    """
    folder = Path(order["folder"])
    if order["rank"] != order["victim"]:
        (folder / f"told-{order['rank']}").touch()
    limit = time.monotonic() + order["timeout_s"] + _LATER_S
    while time.monotonic() < limit:
        if len(list(folder.glob("told-*"))) >= len(order["nodes"]) - 1:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    (_run_under_mpi if given["meets"] == "mpi" else run_rank)(given)
