"""Stacks by py-spy, which pauses a process only for the frames of C and C++."""

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
    """Reader of stacks; `native` adds the frames of C and C++."""

    path: str  # of py-spy
    native: bool

    @property
    def options(self) -> list[str]:
        """The options for `hsgd status` on another node."""
        return ["--native-stacks" if self.native else "--stacks"]

    def stack_of(self, pid: int) -> str:
        """Return py-spy's stacks of a process, or why it failed; blocking, 20 s at most.

        For a stopped process it reads only Python frames, within another 20 s.
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
    """Find py-spy; local. Raises MissingExtra if it is not installed."""
    here = os.path.dirname(sys.executable)
    path = shutil.which("py-spy", path=os.pathsep.join([here, os.environ.get("PATH", "")]))
    if path is None:
        raise MissingExtra("--stacks needs py-spy, which is not installed: pip install py-spy")
    return Reader(path, native)
