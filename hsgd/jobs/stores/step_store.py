"""step_store(): the store in which the ranks of a scheduler's step meet, without MPI or torch.

Rank 0 serves it (StepServer) and publishes where: in a file of its user that only this user can
read, which needs a folder that all nodes share, and, if this node has Munge, at a port that follows
from the name of the step. The others try both, again and again, until one leads to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from hsgd.config import Config
from hsgd.errors import CollectiveTimeout, LaunchError, PeerLost, about
from hsgd.jobs.environment.scheduled_step import ScheduledStep
from hsgd.jobs.stores import munge
from hsgd.jobs.stores.sealed_store import SealedStore
from hsgd.jobs.stores.step_server import MOST_BYTES, MOST_UNPROVEN_BYTES, StepServer, proof

__all__ = ["StepStore", "step_store"]

_CANDIDATES = 8
_CONNECT_S, _GREETING_S, _ANSWER_S = 2.0, 5.0, 30.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_OLD_S = 7 * 24 * 3600.0
# By step and process.
_locks: dict[tuple[ScheduledStep, int], threading.Lock] = {}
_stores: dict[tuple[ScheduledStep, int], SealedStore] = {}


class StepStore:
    """A connection to a StepServer, as board.Store; its values are to be sealed."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._ask(do="set", key=key, value=value)

    def get(self, key: str) -> str:
        return str(self._ask(do="get", key=key))

    def append(self, key: str, text: str) -> None:
        """Append to a value, which begins empty."""
        self._ask(do="append", key=key, value=text)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(do="check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys exist; TimeoutError after `timeout`."""
        seconds = timeout.total_seconds()
        if not self._ask(seconds, do="wait", keys=keys, seconds=seconds):
            raise TimeoutError(f"no rank has set {', '.join(keys)}")

    def _ask(self, wait_s: float = 0.0, **message: Any) -> Any:
        with self._lock:
            try:
                return self._lines.ask(message, wait_s + _ANSWER_S).get("value")
            except (OSError, ValueError) as error:
                raise about(
                    0,
                    PeerLost(
                        f"rank 0, which serves the store in which ranks meet, ended or does not "
                        f"answer ({error}); look at its output"
                    ),
                ) from None


def step_store(step: ScheduledStep, folder: str, timeout_s: float) -> SealedStore:
    """Return this process's connection to the step's store; the same at each call; blocking.

    Args:
        step: this process's.
        folder: that all nodes share, for the file; "" is hsgd/steps in the user's cache folder.
        timeout_s: to find rank 0.

    Raises:
        CollectiveTimeout: rank 0 was not found; says where this rank looked.
        LaunchError: rank 0 can publish nothing.
    """
    key = step, os.getpid()
    with _locks.setdefault(key, threading.Lock()):
        if key not in _stores:
            _stores[key] = _connected(step, folder or _default_folder(), timeout_s)
        return _stores[key]


def _connected(step: ScheduledStep, folder: str, timeout_s: float) -> SealedStore:
    path, owner = Path(folder, step.name) if folder else None, os.getpid()
    if step.rank == 0:
        try:
            server = StepServer(step.name, _ports(step), step.size, lambda: _remove(path, owner))
        except OSError as error:
            raise LaunchError(f"{step.what}: {error}") from None
        atexit.register(server.close)
        _publish(step, server, path, owner)
        lines = _Lines.connected("127.0.0.1", server.port)
        return _sealed(*_greeted(lines, step, server.secret))
    end, pause_s = time.monotonic() + timeout_s, _PAUSE_S
    while True:
        tried: list[str] = []
        for address, port, secret in _places(step, path, tried):
            try:
                return _sealed(*_greeted(_Lines.connected(address, port), step, secret))
            except Exception as error:  # of any kind: a stranger may listen there
                tried.append(f"{address} port {port} ({error})")
            if time.monotonic() > end:
                break
        if time.monotonic() > end:
            raise about(0, CollectiveTimeout(_lost(step, timeout_s, tried)))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _sealed(lines: _Lines, secret: str) -> SealedStore:
    atexit.register(lines.close)
    return SealedStore(StepStore(lines), secret)


def _lost(step: ScheduledStep, timeout_s: float, tried: list[str]) -> str:
    return (
        f"rank 0 of {step.what} was not found within {timeout_s:g} s; tried {', '.join(tried)}. "
        "Check that all ranks make this call, that nodes reach one another over TCP, and that they "
        "share a folder for the file (HSGD_STEP_DIR) or have Munge"
    )


def _default_folder() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "hsgd", "steps") if os.path.isabs(cache) else ""


def _ports(step: ScheduledStep) -> list[int]:
    """Return the ports at which rank 0 tries to listen; the same on all ranks."""
    digest = hashlib.blake2b(step.name.encode(), digest_size=2 * _CANDIDATES).digest()
    parts = (int.from_bytes(digest[at : at + 2], "big") for at in range(0, len(digest), 2))
    ports = Config.from_env().port_range
    return [ports[part % len(ports)] for part in parts]


def _publish(step: ScheduledStep, server: StepServer, path: Path | None, owner: int) -> None:
    """Write the file; LaunchError if neither that nor Munge can lead others here."""
    told = json.dumps({"port": server.port, "secret": server.secret, "hosts": _own_addresses()})
    try:
        if path is None:
            raise OSError("no home folder, and no HSGD_STEP_DIR")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(path.parent)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with open(draft, "x", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(told)
            draft.replace(path)
        except OSError:
            _remove(draft, owner)
            raise
        atexit.register(_remove, path, owner)
    except OSError as error:
        if server.port not in _ports(step) or not step.hosts or not munge.is_usable():
            raise LaunchError(
                f"{step.what}: rank 0 cannot tell the others where it listens: {error}, and no "
                "Munge here; set HSGD_STEP_DIR to a folder that all nodes share, or start with "
                "`hsgd run` or mpirun"
            ) from None


def _remove(path: Path | None, owner: int) -> None:
    """Remove a file of process `owner`, if this is it."""
    if path is not None and os.getpid() == owner:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_old(folder: Path) -> None:
    """Remove files that a killed rank 0 left here days ago."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()


def _own_addresses() -> list[str]:
    """Return names and addresses of this host, of which others may know one."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(name, None)]
    return [each for each in dict.fromkeys(found) if not each.startswith(("127.", "::1"))]


def _places(
    step: ScheduledStep, path: Path | None, tried: list[str]
) -> Iterator[tuple[str, int, str]]:
    """Yield address, port and secret ("": prove by Munge) of where rank 0 may be."""
    try:
        told = _read(path) if path is not None else None
        if told is None:
            tried.append("no file, as there is no home folder")
        else:
            hosts = dict.fromkeys([*told["hosts"], *step.hosts[:1], "127.0.0.1"])
            yield from ((host, told["port"], told["secret"]) for host in hosts)
    except (OSError, ValueError) as error:
        tried.append(f"{path} ({getattr(error, 'strerror', None) or error})")
    if step.hosts:
        yield from ((step.hosts[0], port, "") for port in _ports(step))


def _read(path: Path) -> dict[str, Any]:
    """Return what rank 0 wrote; ValueError if another user may have written it."""
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ValueError("it is not a private file of this user")
        told: dict[str, Any] = json.load(file)
    return told


class _Lines:
    """A connection whose messages are lines of JSON; blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._incoming = bytearray()

    @classmethod
    def connected(cls, host: str, port: int) -> _Lines:
        connection = socket.create_connection((host, port), _CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(connection)

    def hear(self, limit_s: float, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """Return the next message, if it is complete within `limit_s`; OSError, ValueError."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._incoming:
            self._connection.settimeout(max(end - time.monotonic(), 1e-3))
            got = self._connection.recv(1 << 16)
            if not got:
                raise OSError("the connection was closed")
            self._incoming += got
            if len(self._incoming) > most_bytes or time.monotonic() > end:
                raise OSError("an answer is too long, or too slow")
        line, _, self._incoming = self._incoming.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(
        self, message: dict[str, Any], limit_s: float, most_bytes: int = MOST_BYTES
    ) -> dict[str, Any]:
        self._connection.settimeout(limit_s)
        self._connection.sendall(json.dumps(message).encode() + b"\n")
        return self.hear(limit_s, most_bytes)

    def close(self) -> None:
        self._connection.close()


def _greeted(lines: _Lines, step: ScheduledStep, secret: str) -> tuple[_Lines, str]:
    """Return the connection after both sides have proved who they are, and the secret.

    Raises an exception of some kind if it is not this step's rank 0.
    """
    try:
        theirs = lines.hear(_CONNECT_S, MOST_UNPROVEN_BYTES)
        if theirs["step"] != step.name:
            raise ValueError("another step listens there")
        mine = secrets.token_hex(16)
        nonces = (str(theirs["nonce"]), mine, step.name)
        if secret:
            told = {"nonce": mine, "rank": step.rank, "proof": proof(secret, "client", *nonces)}
            answer = lines.ask(told, _GREETING_S, MOST_UNPROVEN_BYTES)
            if not secrets.compare_digest(str(answer["proof"]), proof(secret, "server", *nonces)):
                raise ValueError("it does not know the secret of the step")
            return lines, secret
        credential = munge.seal_for_own_user(":".join(nonces).encode())
        told = {"nonce": mine, "rank": step.rank, "credential": credential}
        answer = lines.ask(told, _GREETING_S, MOST_UNPROVEN_BYTES)
        words = munge.unseal_of_own_user(answer["credential"]).decode().split(":")
        if tuple(words[:-1]) != nonces:
            raise ValueError("it answered with a credential for something else")
        return lines, words[-1]
    except BaseException:
        lines.close()
        raise
