"""The Python stacks of a process, by py-spy where that is installed.

Owns the words of py-spy. It reads the memory of the process and does not stop it, so that a stopped
or hanging one can be read, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from hsgd.errors import MissingExtra

__all__ = ["find_reader", "stack_of"]

_LIMIT_S = 20.0


def find_reader() -> str:
    """The path of py-spy; local. Raises MissingExtra where there is none."""
    here = os.path.dirname(sys.executable)
    path = shutil.which("py-spy", path=os.pathsep.join([here, os.environ.get("PATH", "")]))
    if path is None:
        raise MissingExtra("--stacks needs py-spy, which is not installed: pip install py-spy")
    return path


def stack_of(pid: int, reader: str) -> str:
    """What py-spy says of a process: its stacks, or in one line why it cannot; blocking, 20 s at
    most.
    """
    words = [reader, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {_LIMIT_S:g} s"
    except OSError as error:
        return f"py-spy does not start: {error}"
    if done.returncode == 0:
        return done.stdout.strip()
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    hint = "; as root, or with kernel.yama.ptrace_scope=0, it may read other processes"
    return f"py-spy: {lines[0]}" + (hint if "ermission" in done.stderr else "")
