"""The process that mpirun starts for each rank: it starts the rank, says how that ended, and ends
in the same way. Run as a plain file, without site-packages, so that it costs little.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

__all__ = ["main"]


def main(folder: str) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    with open(f"{folder}/orders") as file:
        order = json.load(file)[rank]
    pid = os.fork()
    if pid == 0:
        if order["launch"]["preload"]:
            os.environ.update(LD_PRELOAD=order["launch"]["library"], HSGD_MIN_BYTES="0")
        environment = {**os.environ, "HSGD_TIMEOUT_S": str(order["timeout_s"])}
        environment["HSGD_INTERFACES"] = "eth0"  # whose links are cut; mpirun has another network
        words = [sys.executable, "-m", "campaigns.chaos.mpi_rank", folder, str(rank)]
        os.execve(sys.executable, words, environment)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(f"{folder}/launch")
    line.sendall(json.dumps({"rank": rank, "is_keeper": True}).encode() + b"\n")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun sends it to both; the rank ends by it
    status = os.waitpid(pid, 0)[1]
    line.sendall(str(status).encode())
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1])
