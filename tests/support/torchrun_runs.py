"""Programs that torchrun starts, and what their ranks said.

Owns the marked runs of torchrun on this machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from toolkit.processes import run_marked

__all__ = ["JOB_S", "free_port", "here", "said", "torchrun"]

JOB_S = 120.0


def here(**more: str) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **os.environ, **more}


def free_port() -> int:
    """A port of this machine at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def torchrun(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(program)
    return run_marked(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)], here(), JOB_S
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of all ranks, sorted: torchrun may put two on one line."""
    return sorted(filter(None, done.stdout.replace("|", "\n").split("\n")))
