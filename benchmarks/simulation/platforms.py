"""The simulated networks: topologies of some sizes, and what a message costs on them.

No such network was at hand, so the numbers are those that others published of InfiniBand at 100
Gbit/s:

- a switch takes 130 ns (NVIDIA's data sheet of the Quantum QM8700; 350 ns is what De Sensi et al.,
  "An In-Depth Analysis of the Slingshot Interconnect", SC 2020, measured of another maker's), and
  4 m of cable at 5 ns a metre take 20 ns: 150 ns for a link with the switch behind it;
- a message of 8 bytes takes 0.90 us from one process to another (OSU's osu_latency, Open MPI with
  UCX, https://gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209, where the bandwidth is that
  of 100 Gbit/s): less the two links to and from one switch, half of it for each end, 0.30 us.

Dragonflies are balanced as in Kim, Dally, Scott and Abts, "Technology-Driven, Highly-Scalable
Dragonfly Topology", ISCA 2008: a group has as much bandwidth to other groups as its nodes have.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "NODES", "Link", "Platform", "platform"]

KINDS = ("fat_tree", "dragonfly", "torus")
NODES = (16, 64, 256, 1024)

# In SimGrid's notation. Fat trees of two levels without oversubscription; dragonflies as groups,
# chassis, routers and nodes, each with the number of cables; tori by dimension.
_TOPOLOGIES = {
    ("fat_tree", 16): "2;4,4;1,4;1,1",
    ("fat_tree", 64): "2;8,8;1,8;1,1",
    ("fat_tree", 256): "2;16,16;1,16;1,1",
    ("fat_tree", 1024): "2;32,32;1,32;1,1",
    ("dragonfly", 16): "2,8;2,1;2,1;2",
    ("dragonfly", 64): "4,5;2,1;4,1;2",
    ("dragonfly", 256): "8,5;4,1;4,1;2",
    ("dragonfly", 1024): "16,4;4,1;8,1;2",
    ("torus", 16): "4,4",
    ("torus", 64): "4,4,4",
    ("torus", 256): "8,8,4",
    ("torus", 1024): "16,8,8",
}


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

    def links_of_node(self) -> int:
        """Over so many links a node sends at once, if it sends to enough others."""
        if self.kind != "torus":
            return 1
        return sum(2 if length > 2 else 1 for length in self._lengths())

    def hops(self) -> tuple[int, int]:
        """Links between two nodes: the fewest there are, and at least so many from every node to
        the one farthest from it."""
        if self.kind == "torus":
            return 1, sum(length // 2 for length in self._lengths())
        if not self.topology:
            return 2, 2
        return 2, 4 if self.kind == "fat_tree" else 3

    def bisection_links(self) -> float:
        """Links in one direction between two halves of the nodes, where they are few."""
        if self.kind == "torus":
            return 2 * self.nodes / max(self._lengths())
        return self.nodes / 2

    def _lengths(self) -> list[int]:
        return [int(word) for word in self.topology.split(",")]

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


def platform(kind: str, nodes: int) -> Platform:
    """One of KINDS with one of NODES. ValueError for others."""
    if (kind, nodes) not in _TOPOLOGIES:
        raise ValueError(f"no {kind} of {nodes} nodes; kinds: {KINDS}, nodes: {NODES}")
    return Platform(kind, nodes, _TOPOLOGIES[kind, nodes])
