"""Containers by namespaces, mounts and a filter of system calls, as engines make them.

No engine runs here: unshare(1) and foreign/sandbox.py do what they do by default. Needs root.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTAINERS", "Container"]

SANDBOX = Path(__file__).with_name("sandbox.py")
_SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
_READ_ONLY = (
    "for place in / /var/tmp /run; do"
    " ! mountpoint -q $place || mount -o remount,bind,ro $place; done",
    "mount -t tmpfs tmpfs /tmp",  # torch does not import without a folder to write in
    "! touch /var/tmp/hsgd-test 2>/dev/null",
    "unset HOME TMPDIR XDG_CACHE_HOME XDG_RUNTIME_DIR",
)
_OWN_PIDS = "--pid --fork --kill-child --mount-proc"


@dataclass(frozen=True)
class Container:
    """How a container differs from the machine around it.

    Attributes:
        namespaces: options of unshare.
        steps: commands of the shell before the program.
        limits: words of foreign/sandbox.py.
    """

    namespaces: str
    steps: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()

    def command(self, *argv: str) -> list[str]:
        """Return what runs a command in a new container of this kind."""
        script = "; ".join(["set -e", *self.steps, 'exec "$0" "$@"'])
        inside = [sys.executable, str(SANDBOX), *self.limits, "--", *argv]
        return ["unshare", *self.namespaces.split(), "sh", "-c", script, *inside]


CONTAINERS = {
    # One for all ranks of the node.
    "docker": Container(
        f"--mount --ipc --uts --net {_OWN_PIDS}",
        (_SMALL_SHM, "hostname 3f1c9a7be012", "ip link set lo up"),
        ("seccomp=docker",),
    ),
    # pyxis, enroot, or pods on the host's network: one for each rank.
    "docker, host network": Container(
        f"--mount --ipc {_OWN_PIDS}", (_SMALL_SHM,), ("seccomp=docker",)
    ),
    # Rootless, with the root read-only and no home.
    "apptainer": Container("--mount --user --map-root-user", _READ_ONLY),
    "apptainer --pid --ipc": Container(
        f"--mount --ipc --user --map-root-user {_OWN_PIDS}", (*_READ_ONLY, _SMALL_SHM)
    ),
    # gVisor and old kernels.
    "no pidfd, no CMA": Container("--mount", (_SMALL_SHM,), ("refuse=ENOSYS",)),
}
