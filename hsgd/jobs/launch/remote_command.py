"""Commands that run another command on a remote host: by srun in an allocation of Slurm, or ssh.

Both pass their input on, and the remote command ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hsgd.jobs.environment.host_list import expanded

__all__ = ["remote", "remote_with_input", "shell_on", "tell"]

# The remote command ends with ssh, as its input ends then. ssh itself passes no signal on, and a
# job would outlive its launcher.
_ENDS_WITH_INPUT = (
    "exec 3<&0; {told}{command} </dev/null 3<&- & job=$!; "
    "{{ cat <&3 >/dev/null 2>&1; kill -TERM $job; }} >/dev/null 2>&1 & watch=$!; "
    "exec 3<&-; wait $job; code=$?; kill $watch 2>/dev/null; exit $code"
)
# One process, beside other steps, on all cores of the node that the job has.
_SRUN = (
    *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap", "--cpu-bind=none"),
    "--quiet",
)
# A host may lose power, or not exist; no user can enter a password.
_OPTIONS = (
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
    *("-o", "ConnectTimeout=10", "-o", "BatchMode=yes"),
)


def shell_on(host: str, *options: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words before a script for a shell on `host`; local.

    Args:
        host: its name; for srun, Slurm's name.
        options: of ssh.
        environ: srun is used if it is on PATH, and `host` in Slurm's allocation.
    """
    nodes = environ.get("SLURM_JOB_NODELIST", "") if "SLURM_JOB_ID" in environ else ""
    is_ours = bool(nodes) and host in expanded(f"SLURM_JOB_NODELIST={nodes}", nodes)
    if is_ours and shutil.which("srun", path=environ.get("PATH", "")):
        return [*_SRUN, f"--nodelist={host}", "sh", "-c"]
    return ["ssh", "-x", *options, "--", host]


def remote(
    host: str, words: Sequence[str], told: str = "", environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a command without input, which gets SIGTERM when ssh or srun ends; local.

    `told` is a variable of the command that gets the first line of the input as value: any user of
    either host can read arguments.
    """
    read = f"IFS= read -r {told} <&3; export {told}; " if told else ""
    script = _ENDS_WITH_INPUT.format(told=read, command=shlex.join(words))
    place = shlex.quote(str(Path.cwd()))
    return [*shell_on(host, environ=environ), f"cd {place} && {{ {script}; }}"]


def remote_with_input(host: str, words: Sequence[str]) -> list[str]:
    """Return a command that reads its input, and ends with it; local."""
    script = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    return [*shell_on(host, *_OPTIONS), script]


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to the input of a process, an unbuffered pipe, if it still runs."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.write(f"{line}\n".encode())
