"""Ranks of device_allreduce.py on one machine: started, listened to, and always ended.

Owns the processes of one layout. Never measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.rank_command import rank_command

__all__ = ["listen"]

SILENT_S = 180.0  # a turn, or the start of torch and CUDA in all ranks
END_S = 10.0


def listen(plan: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What rank 0 says, turn by turn. Raises RuntimeError, with the last error, where ranks failed;
    leaving early ends them.
    """
    path = f"@hsgd-device-{os.getpid()}-{plan['layout'].replace(' ', '-')}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log: Any = stack.enter_context(Path(folder, "log").open("w", encoding="utf-8"))
        words = json.dumps({**plan, "folder": folder})
        ranks = []
        for rank in range(plan["ranks"]):
            process = subprocess.Popen(
                rank_command("device_worker", words, str(rank), path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            stack.callback(_end, process)
            ranks.append(process)
        yield from _lines(ranks[0])
        if any(_code(process) for process in ranks):
            raise RuntimeError(_reason(Path(folder, "log")))


def _lines(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Read without Python's buffer, of which select() knows nothing."""
    assert process.stdout is not None
    rest = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], SILENT_S)
        if not ready:
            raise RuntimeError(f"rank 0 said nothing for {SILENT_S:g} s")
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        for line in whole:
            with contextlib.suppress(json.JSONDecodeError):  # what a library has said
                told = json.loads(line)
                if isinstance(told, dict):
                    yield told


def _code(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        return 1


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _reason(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [line for line in lines if "rror" in line] or lines or ["no rank said why"]
    return telling[-1][:300]
