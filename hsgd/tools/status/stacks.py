"""The stacks of a process, by py-spy where that is installed.

Owns the words of py-spy. For Python's frames alone it reads the memory of the process and does not
stop it, so that a stopped or hanging one can be read, too; for those of C and C++ it pauses it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from hsgd.base.programs import answer_of
from hsgd.errors import MissingExtra

__all__ = ["Reader", "find_reader"]

_LIMIT_S = 20.0
_MAY_NOT = "ermission"


@dataclass(frozen=True)
class Reader:
    """How stacks are read. native: with the frames of C and C++."""

    path: str  # of py-spy
    native: bool

    @property
    def options(self) -> list[str]:
        """What `hsgd status` is asked for on another node."""
        return ["--native-stacks" if self.native else "--stacks"]

    def stack_of(self, pid: int) -> str:
        """What py-spy says of a process: its stacks, or in one line why it cannot; blocking, 20 s
        at most. Of one that is stopped it gets the frames of Python alone, within another 20 s.
        """
        done, text = self._dump(pid, "--native" if self.native else "--nonblocking")
        if done or not self.native or _MAY_NOT in text:
            return text
        return f"{text}; the frames of Python alone:\n{self._dump(pid, '--nonblocking')[1]}"

    def _dump(self, pid: int, how: str) -> tuple[bool, str]:
        try:
            done = answer_of([self.path, "dump", how, "--pid", str(pid)], _LIMIT_S)
        except subprocess.TimeoutExpired:
            return False, f"py-spy did not answer within {_LIMIT_S:g} s"
        except OSError as error:
            return False, f"py-spy does not start: {error}"
        if done.returncode == 0:
            return True, done.stdout.strip()
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        hint = "; as root, or with kernel.yama.ptrace_scope=0, it may read other processes"
        return False, f"py-spy: {lines[0]}" + (hint if _MAY_NOT in done.stderr else "")


def find_reader(*, native: bool) -> Reader:
    """py-spy, where it is installed; local. Raises MissingExtra where it is not."""
    here = os.path.dirname(sys.executable)
    path = shutil.which("py-spy", path=os.pathsep.join([here, os.environ.get("PATH", "")]))
    if path is None:
        raise MissingExtra("--stacks needs py-spy, which is not installed: pip install py-spy")
    return Reader(path, native)
