"""The agent of a node as a program: `hsgd run` starts `python -m hsgd.jobs.elastic.agent_program`.

Its arguments are the options as JSON, then the command. The first line of its input has the secret
of the job; later lines start or stop the draining of its ranks, or name a signal for them; it ends
with the job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hsgd.jobs.elastic.node_agent import AgentOptions, NodeAgent, say
from hsgd.jobs.elastic.node_rounds import NodeRounds, OneNode, Rounds
from hsgd.jobs.elastic.slots import PASSED_ON
from hsgd.jobs.stores.agent_store import open_store
from hsgd.jobs.stores.deadline_store import DeadlineStore
from hsgd.jobs.stores.sealed_store import JOB_SECRET, ForeignValue, sealed

__all__ = ["main", "run_agent", "words"]

_ANSWER_S = 20.0  # for the store, and for nodes that answered just before


def words(options: AgentOptions) -> list[str]:
    """Return the program's arguments for these options; local."""
    found = {name: value for name, value in asdict(options).items() if name != "command"}
    return [json.dumps(found), "--", *options.command]


def run_agent(
    options: AgentOptions, store: Any, *, several_nodes: bool, inputs: int | None = None
) -> int:
    """Run an agent and return its exit code; blocking, in the main thread."""
    rounds: Rounds = OneNode()
    if several_nodes:
        job = options.environment["TORCHELASTIC_RUN_ID"]
        rounds = NodeRounds(_connect(options), job, options.host, options.keep_alive_s)
    agent = NodeAgent(options, store, rounds)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and shells for jobs with "&"
            signal.signal(number, lambda number, _: agent.end(number))
    for name in PASSED_ON:
        signal.signal(signal.Signals[name], lambda number, _: agent.pass_on(number))
    return agent.run(inputs)


def _connect(options: AgentOptions) -> Any:
    host, port = options.environment["MASTER_ADDR"], int(options.environment["MASTER_PORT"])
    return open_store(host, port, _ANSWER_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent whose input comes from the driver."""
    parser = argparse.ArgumentParser(
        prog="python -m hsgd.jobs.elastic.agent_program", description=__doc__
    )
    parser.add_argument("options", help="as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    options = AgentOptions(command=tuple(command), **json.loads(arguments.options))
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as inputs:
        os.environ[JOB_SECRET] = inputs.readline().decode().strip()
    if not os.environ[JOB_SECRET]:
        say("error: the driver gave no secret of the job")
        return 1
    try:
        store = DeadlineStore(sealed(_connect(options)), _ANSWER_S, f"host {options.host}")
        return run_agent(options, store, several_nodes=True, inputs=sys.stdin.fileno())
    except RuntimeError as error:
        where = options.environment["MASTER_ADDR"]
        told = f"no job answers at {where}: {str(error).splitlines()[0]}"
        say(f"error: {error if isinstance(error, ForeignValue) else told}")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's rendezvous may have a thread that waits
