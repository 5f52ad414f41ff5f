"""How ranks hear from the parent: those that stay get orders, a line each on a UNIX socket, from
harness/jobs.py, as native/worker.c does; others a plan, from harness/worker_jobs.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["meet", "read_plan", "serve", "write_result"]


def read_plan() -> SimpleNamespace:
    """What this rank was started for: `rank.py NAME OUT PLAN`, PLAN as JSON."""
    return SimpleNamespace(**json.loads(sys.argv[2]))


def write_result(found: Any) -> None:
    """Write OUT, by one rank; the parent never sees half of it."""
    part = Path(f"{sys.argv[1]}.part")
    part.write_text(json.dumps(found))
    part.replace(sys.argv[1])


def meet(comm: Any) -> None:
    """Start torch's group over gloo, at a file beside OUT; collective."""
    import torch.distributed as dist

    store = Path(f"{sys.argv[1]}.store")
    if comm.rank == 0:
        store.unlink(missing_ok=True)
    comm.barrier()
    dist.init_process_group("gloo", f"file://{store}", rank=comm.rank, world_size=comm.size)


def serve(address: str, rank: int, obey: Callable[..., dict[str, Any]]) -> None:
    """Answer what `obey` returns for the words of each order, until the order is `end` or the
    parent is gone. What it raises is answered as {"error": ...}: the parent goes on with others.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            lines.write(f"{rank}\n")
            lines.flush()
            for line in lines:
                words = line.split()
                try:
                    answer = obey(*words)
                except (Exception, SystemExit) as error:
                    answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
                with contextlib.suppress(BrokenPipeError):
                    lines.write(json.dumps(answer) + "\n")
                    lines.flush()
                if words[0] == "end":
                    break
