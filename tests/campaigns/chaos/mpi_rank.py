"""The program of a rank that mpirun started: python -m campaigns.chaos.mpi_rank FOLDER RANK.

Where ranks outlive one that died it ends without MPI_Finalize, which may wait for the dead
(docs/faults.md); else an exception ends the job, as under python -m mpi4py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from campaigns.chaos.rank_main import be_rank

__all__: list[str] = []

_LATER_S = 1.5  # past its deadline a rank may wait for another node to name who is late


def _main(folder: str, rank: int) -> None:
    order = json.loads((Path(folder) / "orders").read_text())[rank]
    from mpi4py import MPI  # a death in MPI_Init is MPI's own affair

    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # open until this process ends
    line.connect(f"{folder}/launch")
    line.sendall(json.dumps({"rank": rank, "is_keeper": False}).encode() + b"\n")
    try:
        be_rank(order)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if not order["launch"]["lives_on"]:
            MPI.COMM_WORLD.Abort(1)
        if order["has_setup"]:  # ranks wait in hsgd's calls alone, which have deadlines
            _let_others_tell(Path(folder), rank, order)
        os._exit(1)
    if order["launch"]["lives_on"]:
        os._exit(0)


def _let_others_tell(folder: Path, rank: int, order: dict[str, Any]) -> None:
    """Wait until all but the victim have an error. mpirun may end the others when this rank ends
    with an exit code, and the controller would not see that one of them waits for ever.
    """
    if not order["is_victim"]:
        (folder / f"told-{rank}").touch()
    limit = time.monotonic() + order["timeout_s"] + _LATER_S
    while time.monotonic() < limit:
        if len(list(folder.glob("told-*"))) >= len(order["nodes"]) - 1:
            return
        time.sleep(0.05)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
