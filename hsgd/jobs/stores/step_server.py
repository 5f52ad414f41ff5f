"""StepServer: the store of a scheduler's step, which its rank 0 serves to processes of its user.

A visitor first proves that it belongs to the user: by the step's secret, or by a credential of
Munge, for which it gets the secret. All messages are lines of JSON. Values are sealed by the
visitors with that secret, so whoever reads or changes the connection learns and forges none.
"""

from __future__ import annotations

import collections
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hsgd.jobs.stores import munge

__all__ = ["MOST_BYTES", "MOST_UNPROVEN_BYTES", "StepServer", "proof"]

_GREETING_S = 10.0  # for a visitor to prove itself
_MOST_UNPROVEN = 256  # visitors; further ones take the place of the oldest
MOST_UNPROVEN_BYTES = 8192
_SPARE_DESCRIPTORS = 256  # beside those of visitors
MOST_BYTES = 1 << 24  # of a message
_BACKLOG = 4096


def proof(secret: str, side: str, *nonces: str) -> str:
    """Return the proof of one side ("server", "client") that it knows the secret; local."""
    return hmac.digest(secret.encode(), ":".join([side, *nonces]).encode(), "sha256").hex()


class _Visitor:
    """A connection; `waits` are keys that it waits for, until `end_s`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.nonce = secrets.token_hex(16)
        self.is_proven = False
        self.end_s = time.monotonic() + _GREETING_S
        self.waits: set[str] = set()
        self.incoming, self.outgoing = bytearray(), bytearray()


class StepServer:
    """Listens at one of `ports`, or any, and serves in a thread until close().

    Ends to listen, and calls `all_came`, once all `ranks` have proved themselves.

    Attributes:
        port: where it listens, on all addresses of this host.
        secret: of the step.
    """

    def __init__(
        self, step: str, ports: Sequence[int], ranks: int, all_came: Callable[[], object]
    ) -> None:
        self._step = step
        self._missing, self._all_came = set(range(ranks)), all_came
        self._owner = os.getpid()
        _allow_descriptors(ranks)
        self.secret = secrets.token_hex(32)
        self._values: dict[str, str] = {}
        self._waiting: dict[str, set[_Visitor]] = collections.defaultdict(set)
        self._visitors: set[_Visitor] = set()
        self._selector = selectors.DefaultSelector()
        self._door = _listen(ports)
        self.port = int(self._door.getsockname()[1])
        self._door.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hsgd-step-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections; blocking. Does nothing in a forked child."""
        if os.getpid() == self._owner and self._thread.is_alive():
            self._wake.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy
            self._thread.join()
            self._wake.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._next_end_s()):
                if key.fileobj is self._woken:
                    return self._end()
                if key.fileobj is self._door:
                    self._admit()
                else:
                    self._attend(key.data, events)
            now = time.monotonic()
            for visitor in [each for each in self._visitors if each.end_s <= now]:
                self._expire(visitor)

    def _end(self) -> None:
        for connection in (self._door, self._woken, *(each.connection for each in self._visitors)):
            connection.close()
        self._selector.close()

    def _next_end_s(self) -> float | None:
        ends = [each.end_s for each in self._visitors if each.end_s < float("inf")]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _admit(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:  # gone, or no descriptor is left; it may try again
            return time.sleep(0.01)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor = _Visitor(connection)
        unproven = [each for each in self._visitors if not each.is_proven]
        if len(unproven) >= _MOST_UNPROVEN:
            self._leave(min(unproven, key=lambda each: each.end_s))
        self._visitors.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)
        self._tell(visitor, {"step": self._step, "nonce": visitor.nonce})

    def _attend(self, visitor: _Visitor, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                got = visitor.connection.recv(1 << 16)
                if not got:
                    return self._leave(visitor)
                visitor.incoming += got
                self._read(visitor)
            if visitor in self._visitors:
                self._flush(visitor)
        except Exception:  # of any kind: whatever a stranger sends, the others are served
            self._leave(visitor)

    def _read(self, visitor: _Visitor) -> None:
        while True:
            line, found, rest = visitor.incoming.partition(b"\n")
            most = MOST_BYTES if visitor.is_proven else MOST_UNPROVEN_BYTES
            if len(line) > most:
                raise ValueError("a message is too long")
            if not found:
                return
            visitor.incoming = rest
            message = json.loads(line)
            if visitor.is_proven:
                self._answer(visitor, message)
            else:
                self._greet(visitor, message)

    def _greet(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        nonces = (visitor.nonce, str(message["nonce"]), self._step)
        if "credential" in message:
            if munge.unseal_of_own_user(message["credential"]).decode() != ":".join(nonces):
                raise ValueError("a credential for something else")
            told = ":".join([*nonces, self.secret])
            reply = {"credential": munge.seal_for_own_user(told.encode())}
        else:
            if not hmac.compare_digest(message["proof"], proof(self.secret, "client", *nonces)):
                raise ValueError("another secret")
            reply = {"proof": proof(self.secret, "server", *nonces)}
        visitor.is_proven, visitor.end_s = True, float("inf")
        self._tell(visitor, reply)
        if self._missing:
            self._missing.discard(int(message["rank"]))
            if not self._missing:
                self._selector.unregister(self._door)
                self._door.close()
                self._all_came()

    def _answer(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        do, key = message["do"], message.get("key", "")
        if do == "set":
            self._set(key, str(message["value"]))
            self._tell(visitor, {})
        elif do == "append":
            self._set(key, self._values.get(key, "") + str(message["value"]))
            self._tell(visitor, {})
        elif do == "get":
            self._tell(visitor, {"value": self._values[key]})
        elif do == "check":
            self._tell(visitor, {"value": all(each in self._values for each in message["keys"])})
        elif do == "wait":
            visitor.waits = {each for each in message["keys"] if each not in self._values}
            visitor.end_s = time.monotonic() + float(message["seconds"])
            for each in visitor.waits:
                self._waiting[each].add(visitor)
            self._end_wait(visitor)
        else:
            raise ValueError("no such request")

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        for visitor in self._waiting.pop(key, ()):
            visitor.waits.discard(key)
            self._end_wait(visitor)

    def _end_wait(self, visitor: _Visitor) -> None:
        if not visitor.waits:
            visitor.end_s = float("inf")
            self._tell(visitor, {"value": True})

    def _expire(self, visitor: _Visitor) -> None:
        if not visitor.is_proven:
            return self._leave(visitor)
        self._forget_waits(visitor)
        visitor.end_s = float("inf")
        self._tell(visitor, {"value": False})

    def _forget_waits(self, visitor: _Visitor) -> None:
        for key in visitor.waits:
            self._waiting[key].discard(visitor)
        visitor.waits = set()

    def _tell(self, visitor: _Visitor, message: dict[str, Any]) -> None:
        visitor.outgoing += json.dumps(message).encode() + b"\n"
        try:
            self._flush(visitor)
        except OSError:
            self._leave(visitor)

    def _flush(self, visitor: _Visitor) -> None:
        while visitor.outgoing:
            try:
                sent = visitor.connection.send(visitor.outgoing)
            except BlockingIOError:
                break
            del visitor.outgoing[:sent]
        writes = selectors.EVENT_WRITE if visitor.outgoing else 0
        self._selector.modify(visitor.connection, selectors.EVENT_READ | writes, visitor)

    def _leave(self, visitor: _Visitor) -> None:
        if visitor in self._visitors:
            self._visitors.discard(visitor)
            self._forget_waits(visitor)
            self._selector.unregister(visitor.connection)
            visitor.connection.close()


def _allow_descriptors(ranks: int) -> None:
    """Raise this process's soft limit if the visitors need it; OSError if the hard one is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks + _MOST_UNPROVEN + _SPARE_DESCRIPTORS
    if resource.RLIM_INFINITY not in (soft, hard) and soft < needed:
        if hard < needed:
            raise OSError(
                f"rank 0 needs {needed} descriptors for {ranks} ranks, and the hard limit is "
                f"{hard}; raise it (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _listen(ports: Sequence[int]) -> socket.socket:
    """Listen at the first free port of all addresses, IPv6 and IPv4; OSError."""
    for is_dual in (True, False):  # the kernel may have no IPv6
        for port in [*ports, 0]:
            try:
                return socket.create_server(
                    ("", port),
                    family=socket.AF_INET6 if is_dual else socket.AF_INET,
                    backlog=_BACKLOG,
                    dualstack_ipv6=is_dual,
                )
            except (OSError, ValueError) as error:
                reason = error
    raise OSError(f"no port to listen at: {reason}")
