"""An elastic job: its store, the hosts that it may use, and an agent on each host."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hsgd.errors import LaunchError
from hsgd.jobs.elastic import agent_program
from hsgd.jobs.elastic.host_discovery import HostScript
from hsgd.jobs.elastic.job_events import JobEvents
from hsgd.jobs.elastic.node_agent import AgentOptions, say
from hsgd.jobs.elastic.slots import PASSED_ON, save_limit_s
from hsgd.jobs.launch.mpirun import Host
from hsgd.jobs.launch.remote_command import remote_with_input, tell
from hsgd.jobs.stores.agent_store import serve_store
from hsgd.jobs.stores.sealed_store import JOB_SECRET, draw_job_secret, sealed

__all__ = ["ElasticJob", "run"]

_LOOK_S = 0.1
_ASK_S = 1.0  # between calls of the script, as in Horovod
_END_S = 15.0  # agents allow their workers five
_FIRST_PAUSE_S = 5.0  # before a lost host is tried again; doubles each time
_LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True)
class ElasticJob:
    """An elastic job before its start.

    Attributes:
        options: of the agents; `node`, `host` and `slots` are filled in for each.
        hosts: those at the start.
        script: prints the current hosts.
        given: variables for ranks on other hosts.
    """

    options: AgentOptions
    hosts: Mapping[str, Host]
    script: HostScript | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """Whether no other host can take part."""
        return self.script is None and all(host.is_here for host in self.hosts.values())


def run(job: ElasticJob) -> int:
    """Run the job to its end; return 0, 1 if it failed, 128 + N after signal N. LaunchError."""
    os.environ[JOB_SECRET] = draw_job_secret()  # ranks and agents of this host inherit it
    here = "127.0.0.1" if job.is_here else socket.gethostname()
    with socket.socket() as door:
        door.bind(("127.0.0.1" if job.is_here else "", 0))
        door.listen(1024)
        port = int(door.getsockname()[1])
        store = sealed(serve_store(here, door))
    options = replace(job.options, environment={**job.options.environment, **_meeting(here, port)})
    if job.is_here:
        name = next(iter(job.hosts))
        slots = sum(host.slots for host in job.hosts.values())
        own = replace(options, node=name, host=socket.gethostname(), slots=slots)
        return agent_program.run_agent(own, store, several_nodes=False)
    return _Driver(replace(job, options=options), store).run()


def _meeting(host: str, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"hsgd-{secrets.token_hex(8)}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@dataclass
class _Node:
    """A host's agent; `name` is that of this attempt."""

    name: str
    host: Host
    process: subprocess.Popen[bytes]
    drained: bool = False


class _Driver:
    """Driver of a job on several hosts."""

    def __init__(self, job: ElasticJob, store: Any) -> None:
        self._job, self._events = job, JobEvents(store)
        self._hosts = dict(job.hosts)
        self._nodes: dict[str, _Node] = {}
        self._lost: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._codes: list[int] = []  # of agents that reached the end of the job
        self._failed = ""
        self._alone_since = time.monotonic()
        self._stop, self._is_hurried = 0, False
        self._lock = threading.Lock()

    def run(self) -> int:
        before = {
            number: signal.signal(number, self._signalled)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup, and shells for "&"
        }
        before |= {
            number: signal.signal(number, self._pass_on)
            for number in map(signal.Signals.__getitem__, PASSED_ON)
        }
        if self._job.script is not None:
            threading.Thread(target=self._ask, args=(self._job.script,), daemon=True).start()
        try:
            while True:
                code = self._step()
                if code is not None:
                    return code
                time.sleep(_LOOK_S)
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _: object) -> None:
        self._is_hurried = self._stop != 0
        self._stop = number

    def _pass_on(self, number: int, _: object) -> None:
        for node in list(self._nodes.values()):
            tell(node.process, signal.Signals(number).name)

    def _ask(self, script: HostScript) -> None:
        told = ""
        while True:
            try:
                hosts, told = script.ask(), ""
            except LaunchError as error:  # keep the previous hosts
                if str(error) != told:
                    told = str(error)
                    say(told)
            else:
                with self._lock:
                    self._hosts = hosts
            time.sleep(_ASK_S)

    def _step(self) -> int | None:
        if self._stop:
            return 128 + self._stop
        for node in list(self._nodes.values()):
            code = node.process.poll()
            if code is not None:
                del self._nodes[node.host.name]
                self._ended(node, code)
        if self._nodes:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self._job.options.limit_s:
            limit_s = self._job.options.limit_s
            self._failed = f"no host could be used for {limit_s:g} s (--elastic-timeout)"
        if self._failed:
            say(f"error: {self._failed}")
            return 1
        if self._events.changed() and self._events.failed():
            return 1
        if self._codes:
            seated = self._events.seated()
            left = [node for node in self._nodes.values() if node.name in seated]
            return None if left else max(self._codes)
        with self._lock:
            hosts = dict(self._hosts)
        for name, node in self._nodes.items():
            if (name not in hosts) != node.drained:
                self._tell_drain(node, not node.drained)
        for name, host in hosts.items():
            if name not in self._nodes and time.monotonic() >= self._not_before.get(name, 0.0):
                self._start(host)
        return None

    def _ended(self, node: _Node, code: int) -> None:
        done = bool(self._codes) or self._events.finished()
        gone = node.drained and code == 0
        self._events.tell_ended(node.name, lost=not done and not gone)
        if gone:
            say(f"host {node.host.name} is out of the job")
        elif done:
            if node.name in self._events.seated():
                self._codes.append(1 if code else 0)
        elif self._job.script is None and not self._events.begun():
            self._failed = (
                f"host {node.host.name} cannot be used: its agent ended with exit code {code} "
                "before the job had begun"
            )
        else:
            count = self._lost[node.host.name] = self._lost.get(node.host.name, 0) + 1
            pause_s = min(_FIRST_PAUSE_S * 2 ** (count - 1), _LONGEST_PAUSE_S)
            self._not_before[node.host.name] = time.monotonic() + pause_s
            say(
                f"host {node.host.name} was lost (its agent's exit code is {code}); it is tried "
                f"again in {pause_s:g} s"
            )

    def _tell_drain(self, node: _Node, drained: bool) -> None:
        node.drained = drained
        tell(node.process, "drain" if drained else "stay")

    def _start(self, host: Host) -> None:
        options = self._job.options
        name = f"{host.name}/{self._lost.get(host.name, 0)}/{secrets.token_hex(4)}"
        own = replace(options, node=name, host=host.name, slots=host.slots)
        words = [sys.executable, "-m", "hsgd.jobs.elastic.agent_program", *agent_program.words(own)]
        if not host.is_here:
            given = [f"{key}={value}" for key, value in self._job.given.items()]
            words = remote_with_input(host.name, ["env", *given, *words])
        process = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0)
        tell(process, os.environ[JOB_SECRET])  # through the pipe: any user can read arguments
        self._nodes[host.name] = _Node(name, host, process)

    def _end(self) -> None:
        """End all agents; after SIGTERM their ranks may save, until a second signal."""
        processes = [node.process for node in self._nodes.values()]
        if self._stop == signal.SIGTERM:
            self._is_hurried = False  # launchers often send the first signal twice
            for process in processes:
                tell(process, "SIGTERM")
            end = time.monotonic() + save_limit_s() + _END_S
            while not self._is_hurried and time.monotonic() < end:
                if all(process.poll() is not None for process in processes):
                    break
                time.sleep(_LOOK_S)
        for process in processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        end = time.monotonic() + _END_S
        for process in processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
