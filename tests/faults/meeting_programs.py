"""Ranks of one node that meet as an ordinary user, perhaps beside a stranger; a program of its own.

usage: meeting_programs.py RANKS DESCRIPTORS SOMAXCONN [STRANGER [TASK]]

As root it takes a network namespace of its own, sets the limits and forks a stranger (a function of
this file, which runs as another user; hoard() as theirs) and the ranks, which do TASK ("comm" or
"box"). Prints JSON: what each rank was told, "ok" or an error's line, and what the stranger saw.
"""

from __future__ import annotations

import array
import ctypes
import errno
import functools
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hsgd import Comm, HsgdError, ParameterBox
from hsgd.config import Config

__all__ = ["BOX_NAME", "KEY", "NAME", "STRANGER", "USER"]

USER, STRANGER = 54321, 54322  # descriptors under way are limited for ordinary users only
NAME = "@hsgd-test-rendezvous"
KEY = "weights"
BOX_NAME = f"@hsgd-box-{USER}-{KEY}"
# Measures nothing, and takes some KB per rank.
LIGHT = Config(chunk_bytes=4096, oneshot_bytes=256, slots=3, store="ordinary", timeout_s=60.0)
CLONE_NEWNET = 0x40000000
# One byte that all processes share: 1 when no stranger floods doors, or when it has been at one.
FLOODED = mmap.mmap(-1, 1)


def enter_namespace(somaxconn: int) -> None:
    """A network namespace for this process and its children, where abstract names are its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if somaxconn:
        Path("/proc/sys/net/core/somaxconn").write_text(str(somaxconn))


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def start(body: Callable[[], Any], user: int) -> tuple[int, int]:
    """A forked process that writes what body() returns into a pipe: its pid, and the pipe."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become(user)
            os.write(write, json.dumps(body()).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


def finish(pid: int, pipe: int) -> Any:
    with os.fdopen(pipe, "rb") as read:
        output = read.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(output) if code == 0 else f"exit code {code}"


# --- ranks ---


def run_rank(task: str, rank: int, ranks: int) -> str:
    try:
        if task == "box":
            return use_box(rank)
        with Comm.local(NAME, rank, ranks, LIGHT) as comm:
            total = comm.allreduce(np.full(3, rank, np.int64))
            assert total.tolist() == [ranks * (ranks - 1) // 2] * 3, total
            if ranks <= 4:
                meet_again(comm)
    except (HsgdError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def use_box(rank: int) -> str:
    box = ParameterBox.attach(KEY) if rank else ParameterBox.create(KEY, count=100)
    with box:
        box.accumulate(np.ones(100, np.float32))
    return "ok"


def meet_again(comm: Comm) -> None:
    """Whatever opens another socket, again until a flood of guests has reached one."""
    flooded = False
    while not flooded:
        for _ in range(3):
            comm.empty(100)[:] = comm.rank
        part = comm.split(comm.rank % 2)
        assert part is not None
        with part:
            part.barrier()
        flooded = bool(comm.allreduce(np.array([FLOODED[0]], np.uint8), op="min")[0])
    with comm.shrink() as left:
        assert left.size == comm.size
        left.empty(100)[:] = 1


# --- strangers: each is given a function to call when it is in place ---


def take_the_name(ready: Callable[[], None], name: str = NAME) -> dict[str, int]:
    """Listens where the ranks meet; tells how many bytes and descriptors it was sent."""
    seen = {"connections": 0, "bytes": 0, "descriptors": 0}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind("\0" + name[1:])
        door.listen(100)
        ready()
        held = [door]
        while not ended():
            for each in select.select(held, [], [], 0.05)[0]:
                if each is door:
                    held.append(door.accept()[0])
                    seen["connections"] += 1
                    continue
                space = socket.CMSG_SPACE(100 * array.array("i").itemsize)
                data, passed, *_ = each.recvmsg(10_000, space)
                seen["bytes"] += len(data)
                seen["descriptors"] += sum(len(content) for _, _, content in passed)
                if not data:
                    held.remove(each)
    return seen


def take_the_key(ready: Callable[[], None]) -> dict[str, int]:
    """Listens where the holders of a box would."""
    return take_the_name(ready, BOX_NAME)


def hoard(ready: Callable[[], None]) -> int:
    """Has all descriptors under way that its user may, until ranks want to send some of theirs."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        ends[0].setblocking(False)
        passed = array.array("i", [ends[0].fileno()] * 250).tobytes()
        messages = 0
        try:
            while True:
                ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
                messages += 1
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
        ready()
        while not ended() and Path("/proc/net/unix").read_text().count(NAME) < 4:
            time.sleep(0.01)
        time.sleep(0.3)
    return messages


def flood(ready: Callable[[], None]) -> dict[str, int]:
    """Connects to all it finds and sends garbage, and binds the names that may come next."""
    seen = {"connections": 0, "bytes": 0, "descriptors": 0}
    kept: list[socket.socket] = []
    taken: set[str] = set()
    ready()
    while not ended():
        for line in Path("/proc/net/unix").read_text().splitlines():
            name = line.rpartition(" ")[2]
            if not name.startswith("@hsgd-") or name[1:] in taken:
                continue
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            guest.setblocking(False)
            try:
                guest.connect("\0" + name[1:])
                seen["connections"] += 1
                FLOODED[0] = 1
                guest.send(b"garbage" * 100)
            except OSError:
                guest.close()
            else:
                kept.append(guest)
            stem = name[1:].rpartition("-")[0]
            for number in range(8):
                for guess in (f"{name[1:]}-{number}", f"{stem}-{number}", f"{stem}-{number}-left"):
                    if guess in taken:
                        continue
                    taken.add(guess)
                    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    try:
                        door.bind("\0" + guess)
                        door.listen(1)
                        kept.append(door)
                    except OSError:
                        door.close()
        for guest in kept:
            try:
                seen["bytes"] += len(guest.recv(10_000))
            except OSError:
                continue
        del kept[:-300]
    return seen


def ended() -> bool:
    """Whether the ranks are through."""
    return signal.SIGTERM in signal.sigpending()


def start_stranger(name: str) -> tuple[int, int]:
    here, there = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    strange: Callable[[Callable[[], None]], Any] = {
        "take_the_name": take_the_name,
        "take_the_key": take_the_key,
        "flood": flood,
        "hoard": hoard,
    }[name]
    user = USER if name == "hoard" else STRANGER
    stranger = start(lambda: strange(lambda: os.close(there)), user)
    os.close(there)
    os.read(here, 1)  # ends when the stranger is ready
    return stranger


def main() -> None:
    ranks, descriptors, somaxconn = map(int, sys.argv[1:4])
    enter_namespace(somaxconn)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    FLOODED[0] = sys.argv[4:5] != ["flood"]
    stranger = start_stranger(sys.argv[4]) if len(sys.argv) > 4 else None
    task = sys.argv[5] if len(sys.argv) > 5 else "comm"
    body = functools.partial(run_rank, task)
    processes = [start(functools.partial(body, rank, ranks), USER) for rank in range(ranks)]
    reports = [finish(*process) for process in processes]
    seen = None
    if stranger is not None:
        os.kill(stranger[0], signal.SIGTERM)
        seen = finish(*stranger)
    print(json.dumps({"ranks": reports, "stranger": seen}))


if __name__ == "__main__":
    main()
