"""The inside of a virtual cluster: PID 1 of its namespaces, which builds the nodes and holds them.

Started by cluster.py (the picture is there) as a plain file, without site-packages. Writes only to
file systems that it mounted itself, in namespaces without names, so all of it vanishes with this
process. Ends when the controller says so, or is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MARK"]

MARK = "VIRTUAL_CLUSTER_RUN"  # in the environment of all processes of a run

SUBNET = "10.99.0"
MANAGEMENT_SUBNET = "10.98.0"  # of the network beside it, where asked for

# The private /run also hides name service daemons of the machine, which would not know the nodes.
LOGIN_SETUP = """
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/bin /run/nodes /run/tmp
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
ip link set lo up
"""
NODE_SETUP = """
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs /run/tmp
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
eval "$1"
trap '' CHLD
echo ready
exec sleep infinity > /dev/null
"""
BRIDGE_SETUP = """
ip link add "$1" type bridge
ip addr add "$2/24" dev "$1"
ip link set "$1" up
"""
LINK_SETUP = """
inside="nsenter --net=/proc/$1/ns/net"
ip link add "$0" type veth peer name "$3" netns "$1"
ip link set "$0" master "$3" up
$inside ip addr add "$2/24" dev "$3"
$inside ip link set lo up
$inside ip link set "$3" up
[ -z "$4" ] && exit
tc qdisc add dev "$0" root tbf rate "$4" burst 256kb latency 100ms
$inside tc qdisc add dev "$3" root tbf rate "$4" burst 256kb latency 100ms
"""
SSH = f"""#!/bin/sh
# Stands in for ssh: accepts options before and after the host name, and ignores them all.
host=
while [ $# -gt 0 ]; do
  case $1 in
    -[BbcDEeFIiJLlmOoPpQRSWw]) shift 2 ;;
    -*) shift ;;
    *) [ -z "$host" ] || break
       host=${{1#*@}}
       shift ;;
  esac
done
pid=$(cat "/run/nodes/$host" 2>/dev/null) || {{
  echo "ssh: no node named '$host' can be reached from $(cat /proc/sys/kernel/hostname)" >&2
  exit 255
}}
cd "/proc/$pid/ns"
exec nsenter --mount=mnt --uts=uts --ipc=ipc --net=net --pid=pid_for_children -- \\
  env -i PATH=/run/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  HOME="$HOME" USER=root LOGNAME=root SHELL=/bin/sh TMPDIR=/run/tmp {MARK}="${MARK}" \\
  sh -c "cd ~; TMPDIR=\\$(mktemp -d); $*"
"""


class SetupError(RuntimeError):
    """What the machine did not allow."""


def _sh(script: str, *args: str) -> None:
    """Run a set-up script; its own error text becomes the error."""
    done = subprocess.run(
        ["sh", "-euc", script, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SetupError(f"cannot set up {args[0]}: {done.stdout.strip() or done.returncode}")


def _start_node(name: str, own_pid: bool) -> int:
    """Start the process that holds a node's namespaces; returns when they are ready."""
    hide = "mount -t tmpfs tmpfs /run/nodes" if own_pid else ""  # pids in there are login's
    kinds = ["--net", "--uts", "--ipc", "--mount"]
    kinds += ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_pid else []
    node = subprocess.Popen(
        ["unshare", *kinds, "sh", "-euc", NODE_SETUP, name, hide],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert node.stdout is not None
    line = node.stdout.readline().strip()
    if line != "ready":
        raise SetupError(f"cannot set up {name}: {line}")
    return node.pid


def _make(rate: str, own_pid: bool, management: bool, names: Sequence[str]) -> list[int]:
    """Build login, bridge, nodes and links around this process; returns the pids of the nodes."""
    addresses = {"login": f"{SUBNET}.254"}
    addresses |= {name: f"{SUBNET}.{k}" for k, name in enumerate(names, 1)}
    _sh(LOGIN_SETUP, "login")
    _sh(BRIDGE_SETUP, "login", "eth0", addresses["login"])
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    Path("/run/hosts").write_text("\n".join(lines) + "\n")
    Path("/run/bin/ssh").write_text(SSH)
    Path("/run/bin/ssh").chmod(0o755)
    _sh("mount --bind /run/hosts /etc/hosts", "login")
    pids = {"login": 1, **{name: _start_node(name, own_pid) for name in names}}
    for name, pid in pids.items():
        for key in (name, addresses[name]):
            Path("/run/nodes", key).write_text(str(pid))
    for name in names:
        _sh(LINK_SETUP, name, str(pids[name]), addresses[name], "eth0", rate)
    if management:
        _sh(BRIDGE_SETUP, "login", "mgmt0", f"{MANAGEMENT_SUBNET}.254")
        for k, name in enumerate(names, 1):
            words = (str(pids[name]), f"{MANAGEMENT_SUBNET}.{k}", "mgmt0", "")
            _sh(LINK_SETUP, f"{name}-mgmt", *words)
    return [pids[name] for name in names]


def _anchor(watch: str, rate: str, own_pid: str, management: str, *names: str) -> None:
    """Build the cluster, report, and hold it until the controller says so or is gone."""
    try:
        pids = _make(rate, bool(own_pid), bool(management), names)
    except SetupError as error:
        sys.exit(str(error))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # PID 1: the kernel reaps what is left to it
    print("ready", *pids, flush=True)
    select.select([sys.stdin, int(watch)], [], [])
    os._exit(0)


if __name__ == "__main__":
    _anchor(*sys.argv[1:])
