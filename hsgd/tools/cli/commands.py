"""The `hsgd` command. Exit codes: 0 done, 1 an error (HSGD_DEBUG=1: traceback), 2 wrong usage."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hsgd.base import mpi_abi
from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError, MissingExtra
from hsgd.jobs.elastic import cli as agent_cli
from hsgd.jobs.environment.launched_once import launched_once
from hsgd.jobs.environment.launchers import FOR_TORCH
from hsgd.jobs.launch import as_horovod, hook, horovod_options, launch
from hsgd.jobs.launch.allocation import tasks
from hsgd.jobs.launch.mpirun import MOST_RANKS
from hsgd.jobs.stores.sealed_store import JOB_SECRET, draw_job_secret
from hsgd.tools.cli import completion
from hsgd.tools.doctor import cli as doctor_cli
from hsgd.tools.plan import cli as plan_cli
from hsgd.tools.status import cli as status_cli

__all__ = ["main", "make_parser"]

FIRST_STEPS = """hsgd makes data-parallel training faster on nodes with several ranks.

First steps:
  hsgd doctor                                  test this machine: some ten seconds
  hsgd run -np 2 python train.py               start 2 ranks here

Your script:
  import horovod.torch as hvd                  hsgd run --horovod -np 2 python train.py
  init_process_group("gloo"), Lightning, ...   hsgd run --gloo -np 2 python train.py
  init_process_group("hsgd")                   hsgd run -np 2 python train.py, or torchrun
  any MPI program                              LD_PRELOAD=$(hsgd preload) mpirun -np 2 ./app

Your data:
  hsgd data convert SRC DST                    npz, HDF5, images, tar, Parquet, text to slabs

Your network:
  hsgd plan --help                             what a step costs, and which strategy to take

When a job hangs or fails:
  hsgd status                                  what each rank is doing, and which one is late

hsgd --help lists all commands, hsgd COMMAND --help the options of one.
"""
EXAMPLES = """examples:
  hsgd doctor                                     test this machine, and say what to do
  hsgd doctor --all-nodes                         and the other nodes of this allocation
  hsgd info                                       versions, libraries, settings, problems
  hsgd status                                     what each rank of a job that hangs is doing
  hsgd run -np 4 python train.py                  4 ranks here, two-level collectives
  hsgd run -np 4 -H node1:2,node2:2 python train.py
  horovodrun --plugin hsgd -np 4 python train.py  a script of Horovod, as hsgd.torch
  HOROVOD_PLUGIN=hsgd srun python train.py        the same under another launcher
  LD_PRELOAD=$(hsgd preload) mpirun -np 2 ./app   any MPI program
  NCCL_NET_PLUGIN=$(hsgd nccl-plugin) torchrun train.py   NCCL's network over hsgd's TCP
  hsgd plan --nodes 64 --ranks-per-node 8 --link 25gbit --model-mb 100   what a step would cost
  hsgd trace summary timeline.json timeline.json.*   where the time of each rank went
  hsgd data convert digits slabs/                 training data as contiguous HDF5 slabs

Variables HSGD_* tune hsgd; `hsgd info` lists those in effect.
"""
RUN_EXAMPLES = """examples:
  hsgd run -np 2 python train.py
  hsgd run -np 4 -H node1:2,node2:2 python train.py --epochs 3
  hsgd run -np 8 --mpi-args="--mca btl_tcp_if_include eth0" python train.py
  hsgd run -np 2 --dry-run python train.py       print the mpirun command and start nothing
  hsgd run -np 4 -H node1:2,node2:2 --launcher torchrun python train.py   without MPI
  hsgd run --gloo -np 2 python train.py          a program that uses the backend "gloo"
  hsgd run --gloo -- torchrun --nproc-per-node 2 train.py
  hsgd run --horovod -np 2 python train.py       a program that imports horovod.torch
  hsgd run -np 4 --min-np 2 python train.py      elastic: continues without lost ranks

The exit code is the job's. Horovod is not needed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        debug = Config.from_env().debug
    except ValueError:
        debug = False  # the command itself will say so
    try:
        return _run_command(words)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (HsgdError, ValueError, OSError, MemoryError) as error:
        if debug:
            raise
        print(f"hsgd: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


def _run_command(words: list[str]) -> int:
    if not words:
        print(FIRST_STEPS, end="")
        return 0
    arguments = make_parser(words).parse_args(words)
    command: Callable[[argparse.Namespace], int | None] = arguments.command_function
    return command(arguments) or 0


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser; with options of `hsgd data` (h5py) only if `words` begin so; local."""
    parser = argparse.ArgumentParser(
        prog="hsgd",
        description="Two-level collectives, data reader and launcher for data-parallel training.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    doctor_cli.add_parsers(commands)
    preload = commands.add_parser(
        "preload", help="print the path for LD_PRELOAD=$(hsgd preload) mpirun ..."
    )
    preload.add_argument(
        "--abi",
        choices=[*mpi_abi.ABIS.values()],
        help="ABI of the program's MPI: Open MPI; MPICH and Intel MPI; or the standard ABI of "
        "MPI 5 (default: that of the mpirun that is found)",
    )
    preload.set_defaults(command_function=_preload)
    commands.add_parser(
        "nccl-plugin", help="print the path for NCCL_NET_PLUGIN=$(hsgd nccl-plugin) torchrun ..."
    ).set_defaults(command_function=_nccl_plugin)
    clean = commands.add_parser(
        "clean", help="remove sockets in the temporary folder that killed jobs left behind"
    )
    clean.add_argument("--dry-run", action="store_true", help="list the sockets and remove none")
    clean.add_argument("--json", action="store_true", help="print JSON instead of text")
    clean.set_defaults(command_function=_clean)
    status_cli.add_parser(commands)
    _add_trace(commands)
    plan_cli.add_parser(commands)
    shells = commands.add_parser("completion", help="print completion of this command for a shell")
    shells.add_argument("shell", choices=completion.SHELLS, help='eval "$(hsgd completion bash)"')
    shells.set_defaults(command_function=_completion)
    _add_data(commands, wanted="data" in words[:1])
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import importlib.metadata

        print(f"hsgd {importlib.metadata.version('hsgd')}")
        parser.exit()


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="start a job with the right settings for Open MPI or MPICH, or without MPI",
        description="Start a command on several ranks under mpirun, with two-level collectives. "
        "Where there is no mpirun, torchrun starts them: hsgd.Comm(), hsgd.init() and the backend "
        '"hsgd" then need no MPI. Other hosts are reached by ssh, or by srun in an allocation.',
        epilog=RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "-np",
        "-n",
        dest="ranks",
        type=_rank_count,
        metavar="N",
        help="number of ranks (default: that of the resource manager's allocation); leave it out "
        "with --gloo if CMD starts the ranks itself",
    )
    run.add_argument(
        "-H",
        "--hosts",
        metavar="LIST",
        help="hosts and their slots: node1:2,node2:2 (default: those of the resource manager's "
        "allocation, else here)",
    )
    run.add_argument(
        "--mpi-args",
        metavar="WORDS",
        default="",
        help='more words for mpirun, as one string; write --mpi-args="..."',
    )
    run.add_argument(
        "--launcher",
        choices=("auto", "mpirun", "torchrun"),
        default="auto",
        help="what starts the ranks; torchrun needs no MPI and uses TCP between hosts (default: "
        "mpirun, or torchrun if there is no mpirun)",
    )
    run.add_argument(
        "--gloo",
        action="store_true",
        help='serve the process groups that CMD makes with the backend "gloo"; torchrun starts the '
        "ranks, or CMD itself without -np",
    )
    run.add_argument(
        "--horovod",
        action="store_true",
        help="give CMD hsgd.torch if it imports horovod.torch; Horovod need not be installed",
    )
    agent_cli.add_options(run, _rank_count)
    horovod_options.add_options(run)
    run.add_argument("--verbose", action="store_true", help="print the command, then start it")
    run.add_argument("--dry-run", action="store_true", help="print the command and start nothing")
    run.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="CMD ...", help="the command of each rank"
    )
    run.set_defaults(command_function=_run, usage_error=run.error)


def _rank_count(text: str) -> int:
    if text.isdecimal() and len(text.lstrip("0")) > len(str(MOST_RANKS)):
        text = f"{text[:20]}..."
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a number of ranks; give a whole number from 1 to {MOST_RANKS}'
        )
    return int(text)


def _run(arguments: argparse.Namespace) -> int | None:
    job = arguments.job[1:] if arguments.job[:1] == ["--"] else arguments.job
    if not job:
        arguments.usage_error("no command to run; for example: hsgd run -np 2 python train.py")
    mpi_args = shlex.split(arguments.mpi_args)
    Config.from_env()  # report a malformed HSGD_* variable here, once, and not on every rank
    _set_names(arguments)
    is_elastic = agent_cli.is_asked_for(arguments)
    if arguments.gloo and arguments.ranks is None and not is_elastic:
        _run_as_it_is(arguments, job)
        return None
    _refuse_several(os.environ)
    if is_elastic:
        return _run_elastic(arguments, job)
    if arguments.ranks is None:
        arguments.ranks = _ranks_of_allocation(arguments)
    if arguments.launcher == "torchrun" or (arguments.gloo and arguments.launcher == "auto"):
        if mpi_args:
            arguments.usage_error(
                "--mpi-args are words for mpirun, and torchrun starts the ranks; leave them out, "
                "or add --launcher mpirun"
            )
        return _run_without_mpi(arguments, job)
    if not arguments.dry_run:
        os.environ[JOB_SECRET] = draw_job_secret()  # only its name is in the command of mpirun
    try:
        words, added = launch.plan_run(job, arguments.ranks, arguments.hosts, mpi_args, os.environ)
    except launch.NoLauncher:
        if arguments.launcher == "mpirun" or mpi_args or importlib.util.find_spec("torch") is None:
            raise
        print("hsgd: no mpirun was found: torchrun starts the ranks, without MPI", file=sys.stderr)
        return _run_without_mpi(arguments, job)
    _announce(arguments, [launch.read_command(words, {**_named(arguments), **added})])
    if not arguments.dry_run:
        os.execve(words[0], words, {**os.environ, **added})
    return None


def _ranks_of_allocation(arguments: argparse.Namespace) -> int:
    found = None if arguments.hosts else tasks(os.environ)
    if found is None:
        raise arguments.usage_error("the following arguments are required: -np/-n")  # exits itself
    ranks, source = found
    print(f"hsgd: -np {ranks}, by {source}", file=sys.stderr)
    return ranks


def _refuse_several(environ: Mapping[str, str]) -> None:
    """Refuse to run in several tasks: each would start a job of its own."""
    found = launched_once(environ)
    if found is None or found.is_alone:
        return
    if found.launcher is FOR_TORCH:  # an image or a shell may have set them
        told = f"{', '.join(found.told)}: not those of this job"
        print(f"hsgd: {told}; started several times, each is a job of its own", file=sys.stderr)
    else:
        raise LaunchError(
            f"{found.what} started `hsgd run` beside others, and each would start a job of its "
            "own; start it once, which reaches the other hosts of an allocation or of -H itself "
            f"(or, for a job of this process alone, unset {found.names})"
        )


def _named(arguments: argparse.Namespace) -> dict[str, str]:
    names = Config.variables()
    found = horovod_options.variables(arguments)
    if arguments.gloo:
        found[names["as_gloo"]] = "1"
    if arguments.horovod:
        given = Config.from_env().as_horovod
        found[names["as_horovod"]] = "1" if given == "0" else given
    return found


def _set_names(arguments: argparse.Namespace) -> None:
    os.environ.update(_named(arguments))
    if arguments.gloo:
        hook.check_installed("--gloo")
    if arguments.horovod:
        hook.check_installed("--horovod")
        as_horovod.find("horovod", hook.find_elsewhere("horovod"))  # reported once here
    if arguments.hostfile:
        if arguments.hosts:
            arguments.usage_error("-H and --hostfile both give hosts; leave one out")
        arguments.hosts = horovod_options.read_hostfile(arguments.hostfile)
    if idle := horovod_options.without_meaning(arguments):
        print(
            f"hsgd: {', '.join(idle)}: ignored, because hsgd neither negotiates nor fuses",
            file=sys.stderr,
        )


def _run_as_it_is(arguments: argparse.Namespace, job: Sequence[str]) -> None:
    if arguments.hosts or arguments.mpi_args or arguments.launcher != "auto":
        arguments.usage_error("-H, --mpi-args and --launcher place ranks; give -np with them")
    _announce(arguments, [launch.read_command(job, _named(arguments))])
    if not arguments.dry_run:
        try:
            os.execvp(job[0], list(job))
        except OSError as error:
            raise LaunchError(f"{job[0]} does not start: {error.strerror}") from None


def _run_elastic(arguments: argparse.Namespace, job: Sequence[str]) -> int | None:
    from hsgd.jobs.elastic import elastic_job

    if arguments.mpi_args or arguments.launcher != "auto":
        arguments.usage_error(
            "--mpi-args and --launcher are about mpirun and torchrun, and neither starts the ranks "
            "of an elastic job (--min-np, --max-np, --host-discovery-script); leave them out"
        )
    found = agent_cli.plan(arguments, job, os.environ)
    places = ", ".join(map(str, found.hosts.values()))
    _announce(
        arguments,
        [f"{found.options.ranks} ranks on {places}: {launch.read_command(job, _named(arguments))}"],
    )
    return None if arguments.dry_run else elastic_job.run(found)


def _run_without_mpi(arguments: argparse.Namespace, job: Sequence[str]) -> int | None:
    from hsgd.jobs.launch import without_mpi

    commands = without_mpi.plan(
        job, arguments.ranks, arguments.hosts, os.environ, launch.exported(os.environ)
    )
    _announce(arguments, [launch.read_command(words, _named(arguments)) for words in commands])
    if arguments.dry_run:
        return None
    if len(commands) == 1 and not without_mpi.is_remote(commands[0]):
        os.execvp(commands[0][0], commands[0])
    return without_mpi.run_all(commands)


def _announce(arguments: argparse.Namespace, lines: Sequence[str]) -> None:
    if arguments.dry_run or arguments.verbose:
        output = sys.stdout if arguments.dry_run else sys.stderr
        print("\n".join(lines), file=output, flush=True)


def _completion(arguments: argparse.Namespace) -> None:
    try:
        parser = make_parser(["data"])
    except MissingExtra:  # without h5py the commands of data are left out
        parser = make_parser([])
    print(completion.script(arguments.shell, parser), end="")


def _preload(arguments: argparse.Namespace) -> int:
    from hsgd.jobs.launch import preload

    print(preload.loadable(arguments.abi or _abi_of_launcher()))
    return 0


def _nccl_plugin(arguments: argparse.Namespace) -> int:
    from hsgd.jobs.launch import nccl_plugin

    print(nccl_plugin.loadable())
    return 0


def _abi_of_launcher() -> str | None:
    """Return the ABI of the mpirun; None without one, as if srun starts the ranks."""
    try:
        return launch.abi_of(launch.find_launcher(os.environ))
    except LaunchError:
        return None


def _clean(arguments: argparse.Namespace) -> int:
    from hsgd.tools.doctor import leftovers

    found = leftovers.stale_sockets()
    word = "stale" if arguments.dry_run else "removed"
    for path in found:
        if not arguments.dry_run:
            path.unlink(missing_ok=True)
        if not arguments.json:
            print(f"{word}: {path}")
    if arguments.json:
        print(json.dumps({word: [str(path) for path in found]}))
    elif not found:
        print("nothing is left of killed jobs")
    return 0


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser("trace", help="read timelines of hsgd.torch")
    kinds = trace.add_subparsers(metavar="WHAT", required=True)
    summary = kinds.add_parser("summary", help="where the time of each rank went")
    summary.add_argument(
        "files", nargs="+", metavar="FILE", help="timelines, of one rank or of all"
    )
    summary.add_argument("--json", action="store_true", help="print JSON instead of text")
    summary.set_defaults(command_function=_trace_summary)


def _trace_summary(arguments: argparse.Namespace) -> None:
    from hsgd.comm import timeline

    if arguments.json:
        print(json.dumps(timeline.document(arguments.files), indent=2))
    else:
        print(timeline.summarize(arguments.files))


def _add_data(commands: Any, *, wanted: bool) -> None:
    """Add the reader's own commands; h5py is imported only if they are wanted."""
    if not wanted:
        commands.add_parser("data", help="convert, inspect and verify training data in HDF5 slabs")
        return
    try:
        from hsgd.io import cli as data_cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("hsgd"):
            raise
        raise MissingExtra(
            f"hsgd data needs {error.name}, which is not installed; pip install {error.name}"
        ) from None
    data_cli.add_parser(commands)
