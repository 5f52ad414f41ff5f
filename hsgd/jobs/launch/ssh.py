"""Commands that run another command on a remote host by ssh, and end it when ssh ends."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["over_ssh", "over_ssh_with_input", "tell"]

# The remote command ends with ssh, as its input ends then. ssh itself passes no signal on, and a
# job would outlive its launcher.
_ENDS_WITH_SSH = (
    "exec 3<&0; {told}{command} </dev/null 3<&- & job=$!; "
    "{{ cat <&3 >/dev/null 2>&1; kill -TERM $job; }} >/dev/null 2>&1 & watch=$!; "
    "exec 3<&-; wait $job; code=$?; kill $watch 2>/dev/null; exit $code"
)
# A host may lose power, or not exist; no user can enter a password.
_OPTIONS = (
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "ConnectTimeout=10", "-o", "BatchMode=yes"),
)


def over_ssh(host: str, words: Sequence[str], told: str = "") -> list[str]:
    """Return a command without input, which gets SIGTERM when ssh ends; local.

    `told` is a variable of the command that gets the first line of ssh's input as value: any user
    of either host can read arguments.
    """
    read = f"IFS= read -r {told} <&3; export {told}; " if told else ""
    script = _ENDS_WITH_SSH.format(told=read, command=shlex.join(words))
    return ["ssh", "-x", host, f"cd {shlex.quote(str(Path.cwd()))} && {{ {script}; }}"]


def over_ssh_with_input(host: str, words: Sequence[str]) -> list[str]:
    """Return a command that reads its input, and ends with it; local."""
    script = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    return ["ssh", "-x", *_OPTIONS, host, script]


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to the input of a process, an unbuffered pipe, if it still runs."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(f"{line}\n".encode())
