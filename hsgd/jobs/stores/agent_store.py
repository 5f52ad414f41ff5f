"""The store of a job of `hsgd run --min-np`; waits of its workers end if their world breaks."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from hsgd.errors import LaunchError, PeerLost, about
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.stores.sealed_store import sealed

__all__ = ["AgentStore", "broken_key", "connect", "open_store", "serve_store"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_LOOK_S = 0.4  # between checks of the world


def broken_key(world: int) -> str:
    """Return the key with the lost rank of a world, and its end: "RANK TEXT"; local."""
    return f"hsgd/agent/broken/{world}"


class AgentStore:
    """A store of torch.distributed whose waits end when this process's world is broken."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._sealed = sealed(store)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist; PeerLost if the world breaks, TimeoutError after `timeout`."""
        now = time.monotonic()
        end, next_look = now + timeout.total_seconds(), now
        pause_s = _FIRST_PAUSE_S
        while not self._store.check(keys):  # a TCPStore's wait() logs each time-out
            now = time.monotonic()
            if now >= next_look:
                self._check_world()
                next_look = now + _LOOK_S
            left_s = end - now
            if left_s <= 0:
                raise TimeoutError(f"no rank has set {', '.join(keys)}")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check_world(self) -> None:
        world = launcher_variables.agent_round()
        if world is not None and self._sealed.check([broken_key(world)]):
            rank, _, text = self._sealed.get(broken_key(world)).decode().partition(" ")
            raise about(int(rank), PeerLost(text))


def connect(timeout_s: float) -> AgentStore:
    """Return the store of this job, at MASTER_ADDR and MASTER_PORT; blocking. LaunchError."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        return AgentStore(open_store(host, int(port), timeout_s))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"Comm: the job's store at {host}:{port} is out of reach: {reason}"
        ) from None


def open_store(host: str, port: int, timeout_s: float) -> Any:
    """Open a separate connection to a store of torch.distributed; blocking. RuntimeError."""
    import torch.distributed

    dist: Any = torch.distributed

    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def serve_store(host: str, listening: socket.socket, timeout_s: float = 300.0) -> Any:
    """Serve a store of torch.distributed at a socket, which it takes over; local."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
        # The newer server accepts no socket up to torch 2.7.
        use_libuv=tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8),
    )
