"""Which hosts an elastic job may use: a fixed list, or what the user's script prints.

Owns the reading of the script's lines, "name:slots" each, as Horovod's. Never starts anything on a
host.
"""

from __future__ import annotations

import subprocess

from hsgd.errors import LaunchError
from hsgd.launch.mpirun import Host, parse_hosts

__all__ = ["HostScript", "read_hosts"]

_LIMIT_S = 10.0


def read_hosts(text: str, slots: int, script: str) -> dict[str, Host]:
    """Hosts by name, from lines "name:slots" or "name"; local. slots: of those that give none.
    Raises LaunchError."""
    hosts = {}
    for line in text.split("\n"):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        try:
            (host,) = parse_hosts(words if ":" in words else f"{words}:{slots}", 1)
        except (LaunchError, ValueError):
            raise LaunchError(
                f'{script} printed "{line}"; print a host per line: node1:2'
            ) from None
        hosts[host.name] = host
    return hosts


class HostScript:
    """A program that prints the hosts of now; asked once and again.

    slots: of hosts for which it prints none.
    """

    def __init__(self, path: str, slots: int) -> None:
        self._path, self._slots = path, slots

    def ask(self) -> dict[str, Host]:
        """Its answer; blocking. Raises LaunchError where it fails, or takes over 10 s."""
        try:
            done = subprocess.run(
                [self._path],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"--host-discovery-script {self._path}: {error}") from None
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LaunchError(
                f"--host-discovery-script {self._path} failed with exit code {done.returncode}: "
                f"{reason}"
            )
        hosts = read_hosts(done.stdout, self._slots, self._path)
        if not hosts:
            raise LaunchError(f"--host-discovery-script {self._path} printed no host")
        return hosts
