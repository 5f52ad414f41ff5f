"""Limits that containers and clusters put on a process, taken by the process itself.

Owns the words: `refuse=PIDFD` (a number of errno) for pidfd_open and what goes with it, and for
reading other processes' memory (CMA); `files=N` and `addresses=BYTES` more than now, for the
resource limits; `cgroup=FOLDER`; `uid=N`, last, for good.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

__all__ = ["enter"]

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PIDFD = (424, 434, 438)  # pidfd_send_signal, pidfd_open, pidfd_getfd: the same everywhere
_CMA = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv and _writev


def enter(words: Sequence[str]) -> None:
    """Take the limits that the words name, in this order; for good."""
    for word in words:
        name, _, value = word.partition("=")
        {
            "refuse": _refuse,
            "files": _limit_files,
            "addresses": _limit_addresses,
            "cgroup": _join,
            "uid": _become,
        }[name](value)


def _refuse(code: str) -> None:
    number = getattr(errno, code)
    refused = [*_PIDFD, *_CMA.get(platform.machine(), ())]
    program = struct.pack("HBBI", _LOAD, 0, 0, 0)  # the number of the system call
    for call in refused:
        program += struct.pack("HBBI", _JUMP_EQUAL, 0, 1, call)
        program += struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | number)
    program += struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    held = ctypes.create_string_buffer(program)
    header = struct.pack("H6xP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, header, 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({call[0]})")
    if libc.syscall(_PIDFD[1], os.getpid(), 0) >= 0:
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
