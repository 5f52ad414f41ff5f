"""Options of `hsgd run` for elastic jobs, the same as horovodrun's."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hsgd.config import Config
from hsgd.errors import LaunchError, MissingExtra
from hsgd.jobs.launch import launch
from hsgd.jobs.launch.allocation import spread
from hsgd.jobs.launch.mpirun import MOST_RANKS, Host, parse_hosts
from hsgd.jobs.stores.sealed_store import JOB_SECRET

if TYPE_CHECKING:
    from hsgd.jobs.elastic import elastic_job

__all__ = ["add_options", "is_asked_for", "plan"]

_START_S = 30.0  # horovodrun's defaults
_LIMIT_S = 600.0
_FEW_HOSTS = 32


def add_options(run: Any, rank_count: Callable[[str], int]) -> None:
    """Add them to the parser of `hsgd run`; local."""
    group = run.add_argument_group(
        "elastic jobs, for scripts with hvd.elastic.run: lost ranks are replaced, hosts may come "
        "and go"
    )
    for name, text in (
        ("--min-np", "continue with N ranks or more; with fewer the job waits for new ones"),
        ("--max-np", "use at most N ranks (default: all slots)"),
    ):
        group.add_argument(name, type=rank_count, metavar="N", help=text)
    group.add_argument(
        "--host-discovery-script",
        metavar="PROGRAM",
        help="prints the usable hosts, one per line: node1:4; called every second",
    )
    group.add_argument(
        "--slots-per-host",
        type=rank_count,
        metavar="N",
        help="slots of hosts for which the script prints no number (default: 1)",
    )
    for name, default, text in (
        ("--start-timeout", _START_S, "how long the start waits for all -np ranks"),
        ("--elastic-timeout", _LIMIT_S, "how long the job waits for --min-np ranks"),
    ):
        group.add_argument(
            name, type=_seconds, metavar="SECONDS", help=f"{text} (default: {default:g})"
        )
    group.add_argument(
        "--reset-limit",
        type=_count,
        metavar="N",
        help="give up after N changes of the set of ranks",
    )


def is_asked_for(arguments: argparse.Namespace) -> bool:
    """Return whether the job is elastic; local."""
    return any((arguments.min_np, arguments.max_np, arguments.host_discovery_script is not None))


def plan(
    arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]
) -> elastic_job.ElasticJob:
    """Return the job, after a call of the script; LaunchError, MissingExtra, ValueError."""
    from hsgd.jobs.elastic import elastic_job  # late: it takes most of the start-up time of `hsgd`
    from hsgd.jobs.elastic.host_discovery import HostScript
    from hsgd.jobs.elastic.node_agent import AgentOptions

    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "an elastic job meets over the store of torch, which is not installed: pip install "
            "torch"
        )
    least = arguments.min_np or arguments.ranks or 1
    most = arguments.max_np or MOST_RANKS
    script = None
    if arguments.host_discovery_script is not None:
        if arguments.hosts:
            raise ValueError("-H and --host-discovery-script both give hosts; leave one out")
        path = os.path.abspath(arguments.host_discovery_script)
        script = HostScript(path, arguments.slots_per_host or 1)
        hosts = script.ask()
    elif arguments.hosts:
        hosts = {host.name: host for host in parse_hosts(arguments.hosts, 1)}
    else:
        slots = arguments.max_np or arguments.ranks or least
        places = spread(environ, slots, fill=arguments.max_np is arguments.ranks is None) or (
            Host("localhost", slots),
        )
        hosts = {host.name: host for host in places}
    slots = sum(host.slots for host in hosts.values())
    ranks = arguments.ranks or max(least, min(most, slots))
    if not least <= ranks <= most:
        raise ValueError(
            f"--min-np {least}, -np {ranks}, --max-np {most}: give them in ascending order"
        )
    if script is None and slots < least:
        raise LaunchError(f"--min-np is {least}, and the hosts have {slots} slots")
    config = Config.from_env()
    options = AgentOptions(
        command=tuple(command),
        environment=_threads(slots // max(len(hosts), 1), environ),
        node="",
        host="",
        slots=0,
        ranks=ranks,
        min_ranks=least,
        max_ranks=most,
        start_s=arguments.start_timeout or _START_S,
        grace_s=config.timeout_s,
        limit_s=arguments.elastic_timeout or _LIMIT_S,
        keep_alive_s=1 if len(hosts) <= _FEW_HOSTS else 5,
        most_resets=arguments.reset_limit,
    )
    names = [*launch.exported(environ), *{"OMP_NUM_THREADS"}.intersection(environ)]
    given = {name: environ[name] for name in names if name != JOB_SECRET}
    return elastic_job.ElasticJob(options, hosts, script, given)


def _threads(ranks_per_host: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return an even share of the cores for the threads of each rank, unless the user chose."""
    if "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(launch.cores() // max(ranks_per_host, 1), 1))}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds')
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number')
    return int(text)
