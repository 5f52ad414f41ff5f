"""`hsgd status`: options and steps; exit code 1 if nothing was found, or a read failed."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from typing import Any

from hsgd.errors import HsgdError
from hsgd.tools import on_hosts
from hsgd.tools.status import other_nodes, report, stacks
from hsgd.tools.status.looking import Look, Row, look, named_hosts, with_stack
from hsgd.tools.status.stacks import Reader
from hsgd.tools.status.waits import Group, groups_of

__all__ = ["add_parser"]

EXAMPLES = """examples:
  hsgd status                    all your jobs on this node
  hsgd status 4112               the job of a process: a rank, or what started the ranks
  hsgd status --all-nodes        and those of the other nodes of these jobs, over ssh or srun
  hsgd status -H node2,node3     these nodes as well, over ssh or srun
  hsgd status --stacks           and the Python stacks of late ranks
  hsgd status --native-stacks    the same with the frames of C and C++
  hsgd status --watch            repeat every two seconds until the job has ended
  hsgd status --json | jq '.communicators[].held_up_by'

States of a rank; in capitals those that keep others waiting:
  waits     in a call, for other ranks
  LATE      has not made the call in which others wait
  SILENT    in the same call, without a sign of progress for a second or more
  STOPPED   its process is stopped: by SIGSTOP, Ctrl-Z, a debugger
  ENDED     its process has just ended
  works     in a call;  outside: between two calls;  set-up: its ranks meet;  broken: after an error

hsgd status reads ranks from outside and needs no thread or socket in them. So it also shows ranks
that are stopped or hang. It reads your own processes only. docs/faults.md says more.
"""
_EVERY_S = 2.0


def add_parser(commands: Any) -> None:
    """Add the command to the `hsgd` command's subparsers."""
    status = commands.add_parser(
        "status",
        help="show what each rank of a running or hanging job is doing, and which rank is late",
        description="Show what the ranks of your jobs on this node are doing, and which of them "
        "keep the others waiting.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument(
        "pids",
        nargs="*",
        type=_process_number,
        metavar="PID",
        help="only the jobs of these processes: ranks, or what started them, such as mpirun",
    )
    status.add_argument("--json", action="store_true", help="print JSON instead of text")
    status.add_argument(
        "--stacks",
        action="store_true",
        help="add the Python stacks of late ranks, or of all ranks if none is late (needs py-spy)",
    )
    status.add_argument(
        "--native-stacks",
        action="store_true",
        help="the same with the frames of C and C++; pauses each process while it is read",
    )
    status.add_argument(
        "-H", "--hosts", metavar="LIST", help="ask other nodes as well: node2,node3"
    )
    status.add_argument(
        "--all-nodes",
        action="store_true",
        help="ask all other nodes of these jobs as well, over ssh or srun",
    )
    status.add_argument(
        "--watch", action="store_true", help="repeat every two seconds until the job has ended"
    )
    status.set_defaults(command_function=_status)


def _process_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:12]) < 1 << 31):
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not the number of a process')
    return int(text)


def _status(arguments: argparse.Namespace) -> int:
    given = on_hosts.host_names(arguments.hosts) if arguments.hosts else []
    wants_stacks = arguments.stacks or arguments.native_stacks
    reader = stacks.find_reader(native=arguments.native_stacks) if wants_stacks else None
    code = _once(arguments, given, reader)
    while arguments.watch:
        time.sleep(_EVERY_S)
        try:
            code = _once(arguments, given, reader)
        except HsgdError as error:
            print(f"no longer to be read: {error}", file=sys.stderr)
            break
    return code


def _once(arguments: argparse.Namespace, given: list[str], reader: Reader | None) -> int:
    here = look(arguments.pids)
    hosts, unknown = _with_job_hosts(given, here) if arguments.all_nodes else (given, [])
    there = other_nodes.ask(hosts, reader.options if reader else [])
    refused = [*here.refused, *unknown, *there.refused]
    once_each = {(row.host, row.pid, row.comm, row.rank): row for row in (*here.rows, *there.rows)}
    seen = Look(list(once_each.values()), refused)
    if arguments.pids and hosts:
        comms = {row.comm for row in here.rows}
        seen = Look([row for row in seen.rows if row.comm in comms], seen.refused)
    groups = groups_of(seen.rows)
    if reader:
        groups = groups_of(_with_stacks(groups, reader))
    host = socket.gethostname()
    if arguments.json:
        indent = None if arguments.watch else 2
        print(json.dumps(report.document(groups, host, seen.refused), indent=indent), flush=True)
    elif groups:
        start = "\x1b[H\x1b[2J" if arguments.watch and sys.stdout.isatty() else ""
        print(start + report.table(groups), flush=True)
    if not groups:
        nothing = (
            f"no process of yours on {', '.join([host, *hosts])} has an open communicator of hsgd; "
            "a job that has finished has none"
        )
        raise HsgdError("\nhsgd: error: ".join(seen.refused) or nothing)
    for line in seen.refused:
        print(f"hsgd: error: {line}", file=sys.stderr)
    return 1 if seen.refused else 0


def _with_job_hosts(given: list[str], here: Look) -> tuple[list[str], list[str]]:
    """Return given and further hosts of the jobs here, and a line if some are unknown."""
    found, own = named_hosts(here.rows), socket.gethostname()
    hosts = list(dict.fromkeys([*given, *(host for host in found if host != own)]))
    elsewhere = [row.comm for row in here.rows if row.nodes > 1]
    if found or given or not elsewhere:
        return hosts, []
    return hosts, [
        f"--all-nodes: the hosts of communicator {elsewhere[0]} are not known here, because its "
        "first rank on this node cannot be read; name the hosts with -H"
    ]


def _with_stacks(groups: list[Group], reader: Reader) -> list[Row]:
    """Return all rows, with stacks of late ranks, or of all; only of this node's processes."""
    held_up = {(group.comm, rank) for group in groups for rank in group.held_up_by}
    host, known = socket.gethostname(), dict[int, str]()
    rows = []
    for row in (row for group in groups for row in group.rows):
        if held_up and (row.comm, row.rank) not in held_up:
            rows.append(row if row.stack is None else with_stack(row, None))
        elif row.stack is None and row.host == host:
            if row.pid not in known:
                known[row.pid] = reader.stack_of(row.pid)
            rows.append(with_stack(row, known[row.pid]))
        else:
            rows.append(row)
    return rows
