"""`hsgd info` and `hsgd doctor`: what is here, and whether it works."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from hsgd.base import built

__all__ = ["add_parsers"]


def add_parsers(commands: Any) -> None:
    """Add `hsgd info` and `hsgd doctor` to argparse's subparsers `commands`; local."""
    info = commands.add_parser(
        "info",
        help="report versions, libraries, settings and problems; exit code 1 if hsgd cannot be "
        "used",
    )
    form = info.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of text")
    form.add_argument(
        "--flags",
        action="store_true",
        help="print only the flags that compile and link a program with hsgd's C interface",
    )
    info.set_defaults(command_function=_info)
    doctor = commands.add_parser(
        "doctor",
        help="test MPI, launcher, shared memory, links and limits of this machine, and say what to "
        "do; exit code 1 if hsgd cannot be used",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "-H", "--hosts", metavar="LIST", help="test other nodes as well, over ssh: node2,node3"
    )
    doctor.add_argument(
        "--all-nodes",
        action="store_true",
        help="test all other nodes of this allocation as well, over srun or ssh",
    )
    doctor.set_defaults(command_function=_doctor)


def _info(arguments: argparse.Namespace) -> int:
    if arguments.flags:
        print(built.compile_flags())
        return 0
    from hsgd.tools.doctor import info

    report = info.gather()
    if report is None:
        return 0
    text = json.dumps(report.document(), indent=2) if arguments.json else "\n".join(report.lines())
    print(text)
    return 0 if report.usable else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from hsgd.tools import on_hosts
    from hsgd.tools.doctor import checkup

    hosts = on_hosts.host_names(arguments.hosts) if arguments.hosts else []
    if arguments.all_nodes:
        hosts += [host for host in checkup.other_hosts() if host not in hosts]
    trials = checkup.examine()
    if trials is None:
        return 0
    trials += checkup.examine_hosts(hosts)
    if arguments.json:
        print(json.dumps([vars(trial) for trial in trials], indent=2))
    else:
        coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print("\n".join(checkup.lines(trials, coloured=coloured)))
    return 1 if any(trial.state == "fail" for trial in trials) else 0
