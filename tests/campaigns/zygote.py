"""The process that ranks are forked from, on this machine, on a virtual node, or under mpirun.

    python -m campaigns.zygote DOOR NUMBER [MODULE ...]
    python -SI zygote.py DOOR keeper

The first form loads the modules, so that a rank costs milliseconds. The second is for mpirun, which
starts one for each rank: it ends as its rank did. Both connect to the socket at DOOR and do what
`campaigns.zygotes` asks there; both may have a PID namespace of their own, so numbers of processes
are those of the zygote, and it sends the signals. Whoever closes the socket ends zygote and ranks.
Never starts a thread, and needs the standard library alone.
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
import sys
from pathlib import Path
from typing import Any

__all__ = ["Zygote"]

_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1


class Zygote:
    """One that serves the controller at the other end of `line`.

    keeps: its first rank is its last.
    """

    def __init__(self, line: socket.socket, *, keeps: bool) -> None:
        self._line, self._keeps, self._kept = line, keeps, 0
        self._libc = ctypes.CDLL(None)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> dict[str, Any] | None:
        """Fork a rank for each order. Returns the order in the rank, None when nobody asks."""
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._line, selectors.EVENT_READ)
            waiting.register(woken, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in waiting.select()}
                if woken in ready:
                    os.read(woken, 1 << 10)
                    self._reap()
                if self._line.fileno() not in ready:
                    continue
                text = self._line.recv(1 << 16)
                if not text:
                    return None
                request: dict[str, Any] = json.loads(text)
                if request["do"] != "fork":
                    self._answer(request)
                    continue
                pid = os.fork()
                if pid == 0:
                    break
                if self._keeps:  # mpirun sends it to both; the rank ends by it
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    self._kept = pid
                self.say("pid", pid=pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.close(woken)
        os.close(wakes)
        self._line.close()
        order: dict[str, Any] = request["order"]
        return order

    def say(self, what: str, **more: Any) -> None:
        """Tell the controller; when it is gone, there is nobody to tell."""
        with contextlib.suppress(OSError):
            self._line.send(json.dumps({"what": what, **more}).encode())

    def _answer(self, request: dict[str, Any]) -> None:
        if request["do"] == "signal":
            try:
                os.kill(request["pid"], request["number"])
            except ProcessLookupError:
                return self.say("sent", was_there=False)
            return self.say("sent", was_there=True)
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        self.say("children", pids=[int(pid) for pid in pids])

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self.say("ended", pid=found[0], status=found[1])
                if found[0] == self._kept:
                    _end_with(found[1])


def _end_with(status: int) -> None:
    """End this process in the way that `status` of waitpid says."""
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _main(door: str, name: str, *modules: str) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # what is loaded stays: ranks need not go through it when they end
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(door)
    keeps = name == "keeper"
    if keeps:
        name = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    zygote = Zygote(line, keeps=keeps)
    zygote.say("up", number=int(name))
    order = zygote.serve()
    if order is None:
        return
    os.environ.update(order["environment"])
    if order["fresh"]:
        os.execv(sys.executable, [sys.executable, "-m", "campaigns.run_rank", json.dumps(order)])
    from campaigns.run_rank import run_rank

    run_rank(order)


if __name__ == "__main__":
    _main(*sys.argv[1:])
