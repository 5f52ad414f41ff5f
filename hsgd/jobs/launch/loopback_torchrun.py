"""torchrun for the ranks of one host: its store listens on the loopback, and it unpickles nothing.

torchrun's own `--standalone` uses c10d, whose store listens on all addresses and whose state is a
pickle: any process that writes its key can run code as the user of the job. Other users of the host
reach the loopback too, so ranks get a secret, with which hsgd seals its values in that store.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import main

from hsgd.jobs.stores.agent_store import serve_store
from hsgd.jobs.stores.sealed_store import JOB_SECRET, draw_job_secret

__all__ = ["LoopbackRendezvous"]

_NAME = "hsgd-loopback"
_WAIT = timedelta(seconds=600)  # as torchrun's static one


class LoopbackRendezvous(StaticTCPRendezvous):
    """Static rendezvous of one agent with itself, at a store that only this host can reach."""

    def __init__(self, run_id: str) -> None:
        """Listen at once; local. `run_id` names the job in the store."""
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        super().__init__("127.0.0.1", port, 0, 1, run_id, int(_WAIT.total_seconds()))
        self._store = serve_store("127.0.0.1", listening, _WAIT.total_seconds())

    def get_backend(self) -> str:
        return _NAME


if __name__ == "__main__":
    os.environ[JOB_SECRET] = draw_job_secret()  # the ranks inherit it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo's connections stay on the loopback too
    rendezvous_handler_registry.register(_NAME, lambda given: LoopbackRendezvous(given.run_id))
    main(["--nnodes=1", f"--rdzv-backend={_NAME}", *sys.argv[1:]])
