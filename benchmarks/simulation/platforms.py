"""The simulated networks: fat trees of some sizes, and what a message costs on them.

No such network was at hand, so the numbers are those that others published of InfiniBand at 100
Gbit/s:

- a switch takes 130 ns (NVIDIA's data sheet of the Quantum QM8700; 350 ns is what De Sensi et al.,
  "An In-Depth Analysis of the Slingshot Interconnect", SC 2020, measured of another maker's), and
  4 m of cable at 5 ns a metre take 20 ns: 150 ns for a link with the switch behind it;
- a message of 8 bytes takes 0.90 us from one process to another (OSU's osu_latency, Open MPI with
  UCX, https://gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209, where the bandwidth is that
  of 100 Gbit/s): less the two links to and from one switch, half of it for each end, 0.30 us.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["NODES", "Link", "Platform", "fat_tree"]

NODES = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Link:
    """What messages cost.

    Args:
        bytes_per_s: of each link, in each direction.
        hop_s: latency of a link, with the switch behind it.
        send_s: how long a message keeps its sender busy.
        receive_s: how long a message of up to `eager_bytes` keeps its receiver busy.
        eager_bytes: up to so many bytes are sent without waiting for the receiver.
    """

    bytes_per_s: float = 12.5e9
    hop_s: float = 150e-9
    send_s: float = 300e-9
    receive_s: float = 300e-9
    eager_bytes: int = 65536


@dataclass(frozen=True)
class Platform:
    """A network of nodes; `topology` in SimGrid's notation, empty for one crossbar switch."""

    kind: str
    nodes: int
    topology: str
    link: Link = Link()

    def describe(self) -> str:
        """The XML that SimGrid reads, with hosts node-0 to node-N."""
        form = f'topology="{self.kind.upper()}" topo_parameters="{self.topology}" '
        link = f'bw="{self.link.bytes_per_s!r}Bps" lat="{self.link.hop_s!r}s" '
        return (
            "<?xml version='1.0'?>\n"
            '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
            '<platform version="4.1">\n'
            '<cluster id="cluster" prefix="node-" suffix="" speed="1Gf" '
            f'radical="0-{self.nodes - 1}" {link}{form if self.topology else ""}'
            'sharing_policy="SPLITDUPLEX"/>\n'
            "</platform>\n"
        )

    def hops(self) -> tuple[int, int]:
        """Links between two nodes: the fewest there are, and at least so many from every node to
        the one farthest from it."""
        return 2, 4 if self.topology else 2

    def settings(self) -> list[str]:
        """SimGrid's options: no corrections but the parameters of `link`, no time for computing."""
        link = self.link
        options = {
            "network/model": "SMPI",
            "network/bandwidth-factor": "1",
            "network/latency-factor": "1",
            "network/weight-S": "0",
            "network/crosstraffic": "0",
            "smpi/bw-factor": "0:1",
            "smpi/lat-factor": "0:1",
            "smpi/os": f"0:{link.send_s!r}:0",
            "smpi/ois": f"0:{link.send_s!r}:0",
            "smpi/or": f"0:{link.receive_s!r}:0",
            "smpi/async-small-thresh": f"{link.eager_bytes}",
            "smpi/send-is-detached-thresh": f"{link.eager_bytes}",
            "smpi/test": "0",
            "smpi/wtime": "0",
            "smpi/grow-injected-times": "no",
            "smpi/simulate-computation": "no",
            "smpi/privatization": "no",
            "contexts/stack-size": "512",
        }
        return ["--log=root.thresh:critical", *(f"--cfg={k}:{v}" for k, v in options.items())]


def fat_tree(nodes: int) -> Platform:
    """Two levels without oversubscription, in SimGrid's notation, of one of NODES."""
    half = math.isqrt(nodes)
    return Platform("fat_tree", nodes, f"2;{half},{half};1,{half};1,1")
