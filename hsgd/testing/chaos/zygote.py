"""The process that ranks are forked from: it has loaded torch, so that a rank costs milliseconds.

Owns the ranks: who ends is waited for and reported. A rank runs to the end of the interpreter, as
any program does. Never starts a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from typing import Any

__all__ = ["Zygote"]

_HEAVY = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
)
_PROGRAMS = ("core_programs", "optim_programs", "torch_programs", "reader_programs")
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1


class Zygote:
    """Starts ranks; a context manager. `fileno()` is readable when a rank has ended."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hsgd.testing.chaos.zygote", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._ended: list[tuple[int, int]] = []
        self._receive("up")

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()
        self._process.wait(30)

    def fileno(self) -> int:
        """To poll."""
        return self._here.fileno()

    def start(self, order: dict[str, Any]) -> int:
        """Fork a rank; its pid."""
        self._here.send(json.dumps(order).encode())
        return int(self._receive("pid")["pid"])

    def ended(self) -> tuple[int, int] | None:
        """Pid and wait status of a process that has ended; None where no other has."""
        while not self._ended and _readable(self._here):
            self._receive("ended")
        return self._ended.pop(0) if self._ended else None

    def children(self) -> list[int]:
        """Processes that are left, those that ranks left behind too."""
        with contextlib.suppress(OSError):
            path = f"/proc/{self._process.pid}/task/{self._process.pid}/children"
            with open(path) as file:
                return [int(word) for word in file.read().split()]
        return []

    def _receive(self, wanted: str) -> dict[str, Any]:
        while True:
            text = self._here.recv(1 << 12)
            if not text:
                raise RuntimeError("chaos: the process that starts ranks has ended")
            told: dict[str, Any] = json.loads(text)
            if told["what"] == "ended":
                self._ended.append((told["pid"], told["status"]))
            if told["what"] == wanted:
                return told


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as waiting:
        waiting.register(connection, selectors.EVENT_READ)
        return bool(waiting.select(0))


def _serve(controller: socket.socket) -> dict[str, Any] | None:
    """Fork a rank for each order. Returns the order in the rank, None at the end of the zygote."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as waiting:
        waiting.register(controller, selectors.EVENT_READ)
        waiting.register(woken, selectors.EVENT_READ)
        _tell(controller, what="up")
        while True:
            ready = {key.fd for key, _ in waiting.select()}
            if woken in ready:
                os.read(woken, 1 << 10)
                _reap(controller)
            if controller.fileno() not in ready:
                continue
            text = controller.recv(1 << 16)
            if not text:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
                break
            _tell(controller, what="pid", pid=pid)
    os.close(woken)
    os.close(wakes)
    controller.close()
    order: dict[str, Any] = json.loads(text)
    return order


def _reap(controller: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            _tell(controller, what="ended", pid=found[0], status=found[1])


def _tell(controller: socket.socket, **what: Any) -> None:
    with contextlib.suppress(OSError):
        controller.send(json.dumps(what).encode())


def _be_rank(order: dict[str, Any]) -> None:
    output = os.open(f"{order['folder']}/output-{order['rank']}", os.O_WRONLY | os.O_CREAT, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if order["cores"]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: order["cores"]])
    from hsgd.testing.chaos.seat import Seat, WrongResult

    seat = Seat(order)
    module, name = order["program"].split(":")
    try:
        program = getattr(importlib.import_module(f"hsgd.testing.chaos.{module}"), name)
        program(seat)
    except WrongResult as error:
        seat.say("wrong", text=str(error))
        raise
    except BaseException as error:
        seat.say("error", kind=_kinds(error), text=str(error), rank=_rank_of(error))
        raise
    seat.say("done")


def _kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _rank_of(error: BaseException) -> int:
    found = getattr(error, "rank", -1)
    cause = error.__cause__
    return _rank_of(cause) if found == -1 and cause is not None else int(found)


def _main() -> None:
    for name in (*_HEAVY, *(f"hsgd.testing.chaos.{program}" for program in _PROGRAMS)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what is loaded stays: ranks need not go through it when they end
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        _be_rank(order)


if __name__ == "__main__":
    _main()
