"""torchrun for the ranks of one host: its store listens on the loopback, and it unpickles nothing.

torchrun's own `--standalone` meets by c10d, whose store listens on all addresses and whose state is
a pickle: whoever writes its key runs code as the user of the job.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import main

__all__ = ["LoopbackRendezvous"]

_NAME = "hsgd-loopback"
_WAIT = timedelta(seconds=600)  # as torchrun's static one


class LoopbackRendezvous(StaticTCPRendezvous):
    """Static meeting of one agent with itself, at a store that only this host reaches."""

    def __init__(self, run_id: str) -> None:
        """run_id: names the job in the store. Listens at once; local."""
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        super().__init__("127.0.0.1", port, 0, 1, run_id, int(_WAIT.total_seconds()))
        self._store = TCPStore(
            "127.0.0.1", port, 1, True, _WAIT, master_listen_fd=listening.detach()
        )

    def get_backend(self) -> str:
        return _NAME


def _make(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(parameters.run_id)


if __name__ == "__main__":
    rendezvous_handler_registry.register(_NAME, _make)
    main(["--nnodes=1", f"--rdzv-backend={_NAME}", *sys.argv[1:]])
