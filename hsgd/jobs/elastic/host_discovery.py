"""Host discovery: the user's script prints the usable hosts, as lines of a hostfile."""

from __future__ import annotations

import subprocess

from hsgd.base.programs import answer_of
from hsgd.errors import LaunchError
from hsgd.jobs.launch.horovod_options import read_host_lines
from hsgd.jobs.launch.mpirun import Host, parse_hosts

__all__ = ["HostScript"]

_LIMIT_S = 10.0


class HostScript:
    """A program that prints the current hosts, with `slots` for those without a number."""

    def __init__(self, path: str, slots: int) -> None:
        self._path, self._slots = path, slots

    def ask(self) -> dict[str, Host]:
        """Return the hosts by name; blocking. LaunchError if it fails, or takes over 10 s."""
        source = f"--host-discovery-script {self._path}"
        try:
            done = answer_of([self._path], _LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{source}: {error}") from None
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LaunchError(f"{source} failed with exit code {done.returncode}: {reason}")
        hosts = read_host_lines(done.stdout, source, self._slots)
        if not hosts:
            raise LaunchError(f"{source} printed no host")
        return {host.name: host for host in parse_hosts(hosts, 1)}
