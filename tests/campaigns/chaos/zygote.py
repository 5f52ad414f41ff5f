"""The process that ranks are forked from: it has loaded torch, so that a rank costs milliseconds.

Owns the ranks: who ends is waited for and reported. A rank runs to the end of the interpreter, as
any program does. Never starts a thread. It may live in other namespaces than the controller, so
numbers of processes are its own, and it sends the signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from campaigns.chaos.starter import StarterError

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
    """A Starter, and a context manager.

    command: makes of the argv of the zygote one that runs it elsewhere.
    """

    leaving_s = 1.0

    def __init__(
        self,
        command: Callable[[list[str]], list[str]] = list,
        store: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.store = store
        self._here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            argv = [sys.executable, "-m", "campaigns.chaos.zygote", str(there.fileno())]
            self._process = subprocess.Popen(
                command(argv),
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

    def start(self, orders: Sequence[dict[str, Any]]) -> list[int]:
        """Fork a rank for each order; their pids."""
        return [self._ask("pid", do="fork", order=order)["pid"] for order in orders]

    def send(self, rank: int, number: signal.Signals) -> bool:
        """A signal to a rank; False where it has ended."""
        return bool(self._ask("sent", do="signal", pid=rank, number=int(number))["was_there"])

    def ended(self) -> tuple[int, int] | None:
        """Pid and wait status of a process that has ended; None where no other has."""
        while not self._ended and _readable(self._here):
            self._receive("ended")
        return self._ended.pop(0) if self._ended else None

    def left(self) -> list[str]:
        """Processes that are left, those that ranks left behind too."""
        return [f"process {pid}" for pid in self._ask("children", do="count")["pids"]]

    def end_case(self) -> None:
        """Nothing but ranks is started."""

    def set_link(self, node: int, state: str) -> None:
        """There is none."""
        raise StarterError(f"chaos: node {node} is pretended and has no link to set {state}")

    def _ask(self, answer: str, **request: Any) -> dict[str, Any]:
        self._here.send(json.dumps(request).encode())
        return self._receive(answer)

    def _receive(self, wanted: str) -> dict[str, Any]:
        while True:
            text = self._here.recv(1 << 12)
            if not text:
                raise StarterError("chaos: the process that starts ranks has ended")
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
            request: dict[str, Any] = json.loads(text)
            if request["do"] != "fork":
                _answer(controller, request)
                continue
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
    order: dict[str, Any] = request["order"]
    return order


def _answer(controller: socket.socket, request: dict[str, Any]) -> None:
    if request["do"] == "signal":
        try:
            os.kill(request["pid"], request["number"])
        except ProcessLookupError:
            return _tell(controller, what="sent", was_there=False)
        return _tell(controller, what="sent", was_there=True)
    pids: list[int] = []
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [int(word) for word in file.read().split()]
    _tell(controller, what="children", pids=pids)


def _reap(controller: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            _tell(controller, what="ended", pid=found[0], status=found[1])


def _tell(controller: socket.socket, **what: Any) -> None:
    with contextlib.suppress(OSError):
        controller.send(json.dumps(what).encode())


def _main() -> None:
    for name in (*_HEAVY, *(f"campaigns.chaos.{program}" for program in _PROGRAMS)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what is loaded stays: ranks need not go through it when they end
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order is not None:
        from campaigns.chaos.rank_main import be_rank

        be_rank(order)


if __name__ == "__main__":
    _main()
