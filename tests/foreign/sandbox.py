"""Limits that containers and clusters put on a process, taken by the process itself.

Owns the words: `refuse=ENOSYS` (a number of errno) for pidfd_open and what goes with it, and for
reading other processes' memory (CMA); `seccomp=docker` for what Docker's default profile refuses a
process without capabilities; `files=N` and `addresses=BYTES` more than now, for the
resource limits; `cgroup=FOLDER`; `uid=N`, last, for good.

`python sandbox.py WORD ... -- COMMAND` runs a command so.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["enter"]

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PIDFD = (424, 434, 438)  # pidfd_send_signal, pidfd_open, pidfd_getfd: the same everywhere
_CLONE3 = 435
# move_pages (which would return 0 for the process alone) to userfaultfd: moby's default.json.
_DOCKER = {
    "x86_64": (
        *(279, 256, 237, 238, 239),  # move_pages, migrate_pages, mbind, set and get_mempolicy
        *(248, 249, 250, 321, 298, 312),  # add_key, request_key, keyctl, bpf, perf_event_open, kcmp
        *(101, 310, 311),  # ptrace, process_vm_readv and _writev, before Linux 4.8
        *(165, 166, 272, 308, 304, 323),  # mount, umount2, unshare, setns, open_by_handle_at, ...
        *(425, 426, 427),  # io_uring
    ),
    "aarch64": (
        *(239, 238, 235, 237, 236),
        *(217, 218, 219, 280, 241, 272),
        *(117, 270, 271),
        *(40, 39, 97, 268, 265, 282),
        *(425, 426, 427),
    ),
}
_CMA = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv and _writev


def enter(words: Sequence[str]) -> None:
    """Take the limits that the words name, in this order; for good."""
    for word in words:
        name, _, value = word.partition("=")
        {
            "refuse": _refuse,
            "seccomp": _refuse_as,
            "files": _limit_files,
            "addresses": _limit_addresses,
            "cgroup": _join,
            "uid": _become,
        }[name](value)


def _refuse(code: str) -> None:
    refused = [*_PIDFD, *_CMA.get(platform.machine(), ())]
    _filter(dict.fromkeys(refused, getattr(errno, code)))


def _refuse_as(profile: str) -> None:
    assert profile == "docker"
    refused = dict.fromkeys(_DOCKER[platform.machine()], errno.EPERM)
    _filter({**refused, _PIDFD[2]: errno.EPERM, _CLONE3: errno.ENOSYS})


def _filter(refused: Mapping[int, int]) -> None:
    """Let these system calls fail with these errors, here and in all children."""
    program = struct.pack("HBBI", _LOAD, 0, 0, 0)  # the number of the system call
    for call, number in refused.items():
        program += struct.pack("HBBI", _JUMP_EQUAL, 0, 1, call)
        program += struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | number)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    held = ctypes.create_string_buffer(program)
    header = struct.pack("H6xP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, header, 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({call[0]})")
    if libc.syscall(next(iter(refused)), os.getpid(), 0) >= 0:
        raise RuntimeError("the filter does nothing")


def _limit_files(more: str) -> None:
    most = len(os.listdir("/proc/self/fd")) - 1 + int(more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _limit_addresses(more: str) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int(more)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _join(folder: str) -> None:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))


def _become(uid: str) -> None:
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))


if __name__ == "__main__":
    end = sys.argv.index("--")
    enter(sys.argv[1:end])
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
