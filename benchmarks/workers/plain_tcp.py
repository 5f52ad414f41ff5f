"""A stream of bytes each way between the first and the last rank: the most that a network and the
cores behind it can do with as many bytes.

Owns two connections, one for each direction, as those of hsgd.NotifiedWindow are. Never looks at
the bytes, and uses nothing but sockets.
"""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np

from hsgd import Comm

__all__ = ["PlainTcp"]

LIMIT_S = 60  # of a call that waits for the other side
TAKEN = 1 << 20  # bytes of a call that receives


class PlainTcp:
    """Made by all ranks; those between the first and the last have nothing to do."""

    def __init__(self, comm: Comm, nbytes: int) -> None:
        self._sockets: list[socket.socket] = []
        self._ends = comm.rank in (0, comm.size - 1)
        self._out, self._in = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        with socket.create_server(("", 0), backlog=2) as listener:
            here = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
            place = np.array([*here, listener.getsockname()[1]], np.int64)
            *host, port = (int(number) for number in comm.broadcast(place))
            if comm.rank == comm.size - 1:
                address = (".".join(map(str, host)), port)
                sockets = [socket.create_connection(address, LIMIT_S) for _ in range(2)]
                for number, each in enumerate(sockets):
                    each.sendall(bytes([number]))
                self._sockets = sockets
            elif comm.rank == 0:
                listener.settimeout(LIMIT_S)
                taken = [listener.accept()[0] for _ in range(2)]
                # What the other side sends on is what this one receives from.
                self._sockets = sorted(taken, key=lambda each: each.recv(1), reverse=True)
        for each in self._sockets:
            each.setblocking(True)  # with limits that cost nothing
            for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                each.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", LIMIT_S, 0))
        comm.barrier()

    def both_ways(self) -> None:
        """Send all bytes and receive as many; blocking. Raises OSError."""
        if not self._ends:
            return
        sending, receiving = self._sockets
        sender = threading.Thread(target=sending.sendall, args=(self._out,))
        sender.start()
        left = memoryview(self._in)
        while left:
            got = receiving.recv_into(left[:TAKEN], 0, socket.MSG_WAITALL)
            if got == 0:
                raise ConnectionError("the other side has closed its connection")
            left = left[got:]
        sender.join()

    def close(self) -> None:
        """Close the connections; local."""
        for each in self._sockets:
            each.close()
