"""`horovodrun --plugin`: its option, the checks before a launch, and the mpirun command line.

The start-up hook calls extend() when Horovod's launcher is loaded. Open MPI 5 and MPICH 5 refuse
Horovod's own command line (Horovod 0.28.1, horovod/runner/mpi_run.py). A launch without the plugin
does not change, and Horovod does the rest: host checks, interface probes, settings.
"""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hsgd.errors import LaunchError
from hsgd.jobs.launch import launch, mpirun, preload

__all__ = ["check_launch", "extend", "mpi_run"]

HELP = (
    f"{preload.AS_HOROVOD}: `import horovod.torch` gives hsgd.torch in all workers, and other "
    f"frameworks get the other plugin. {preload.INTERPOSER}: Horovod stays, and its MPI calls "
    "become two-level ones. Both need MPI: not for Gloo, elastic or jsrun launches. Default: "
    f"${preload.VARIABLE}."
)
ALTERNATIVES = (
    "the plugins need MPI, which never starts there; use --mpi, or leave out "
    f"--plugin (or ${preload.VARIABLE})"
)


class _Arguments(ModuleType):
    """argparse for Horovod's launcher: its parser also knows --plugin."""

    def __init__(self) -> None:
        super().__init__(argparse.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(argparse, name)

    class ArgumentParser(argparse.ArgumentParser):
        def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
            if (
                self.description == "Horovod Runner"
                and "--plugin" not in self._option_string_actions
            ):
                group = self.add_argument_group("plugin arguments")
                group.add_argument("--plugin", metavar="NAME", default=None, help=HELP)
            return super().parse_known_args(*args, **kwargs)


def extend(launcher: ModuleType) -> None:
    """Add the --plugin option to horovod.runner.launch; local, called once when it is loaded."""
    launcher.argparse = _Arguments()  # type: ignore[attr-defined]
    launcher._run = _with_plugin(launcher, launcher._run)  # type: ignore[attr-defined]


def _with_plugin(launcher: ModuleType, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run_with_plugin(args: Any) -> Any:
        name = getattr(args, "plugin", None)
        plugin = preload.plugin_of(os.environ) if name is None else name
        if name is None and not plugin:
            return run(args)
        try:
            check_launch(launcher, args, plugin)
        except (LaunchError, ValueError) as error:
            if args.run_func is not None:  # horovod.run() in a program, which can catch it
                raise
            print(f"hsgd: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        with _replaced(launcher, plugin):
            return run(args)

    return run_with_plugin


@contextmanager
def _replaced(launcher: Any, plugin: str) -> Iterator[None]:
    """Set the plugin's environment and mpi_run for one launch, and restore them."""
    variable, original = os.environ.get(preload.VARIABLE), launcher.mpi_run
    os.environ[preload.VARIABLE] = plugin
    launcher.mpi_run = mpi_run
    try:
        yield
    finally:
        launcher.mpi_run = original
        if variable is None:
            del os.environ[preload.VARIABLE]
        else:
            os.environ[preload.VARIABLE] = variable


def check_launch(launcher: Any, args: Any, plugin: str) -> None:
    """Raise LaunchError if the plugin cannot work in this launch; local, blocking, starts no rank.

    Also repairs `args`: horovod.run() passes cycle_time_ms and cache_capacity as (None,), which
    Horovod reads as 0.
    """
    preload.check_plugin(plugin)
    if args.host_discovery_script is not None or args.min_num_proc is not None:
        raise LaunchError(f"elastic launch (--min-np, --host-discovery-script): {ALTERNATIVES}")
    if args.use_gloo:
        raise LaunchError(f"--gloo: {ALTERNATIVES}")
    if args.use_jsrun or (
        not args.use_mpi and launcher.lsf.LSFUtils.using_lsf() and launcher.is_jsrun_installed()
    ):
        raise LaunchError(
            "jsrun: the plugin starts ranks with mpirun only; use --mpi, or leave --plugin out"
        )
    preload.refuse_other_backends(os.environ)
    for name in ("cycle_time_ms", "cache_capacity"):
        if getattr(args, name) == (None,):
            setattr(args, name, None)
    if args.num_proc is not None and args.num_proc < 1:
        raise LaunchError(f"-np {args.num_proc}: ask for at least one rank")
    if args.hosts:
        mpirun.parse_hosts(args.hosts, args.num_proc or 0)
    abi = preload.abi_of_horovod()
    launch.find_launcher(os.environ, abi)
    preload.check_loadable(preload.library(abi))
    if not preload.horovod_libraries():
        raise LaunchError(f"Horovod has no compiled library for any framework; {preload.REBUILD}")
    preload.check_horovod()
    if not launcher.mpi_built(verbose=False):  # as Horovod itself chooses a launcher
        raise LaunchError(
            "Horovod was built without MPI, or its library does not load (horovodrun --check-build "
            f"tells), so it would start with Gloo; {preload.REBUILD}"
        )


def mpi_run(
    settings: Any,
    nics: Any,
    env: dict[str, str],
    command: list[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Start the job in place of horovod.runner.mpi_run.mpi_run, by arguments that MPI 5 accepts.

    Replaces this process by mpirun, unless settings.run_func_mode; then it raises RuntimeError for
    a failed job.
    """
    from horovod.runner.common.util import env as env_util
    from horovod.runner.common.util import safe_shell_exec

    env = copy.copy(env)
    for name in ("PATH", "PYTHONPATH"):
        if name in os.environ:
            env.setdefault(name, os.environ[name])
    launcher = launch.find_launcher(env, preload.abi_of_horovod())
    env.update(launch.job_environment(launcher, env))
    ssh = ["-p", str(settings.ssh_port)] if settings.ssh_port else []
    ssh += ["-i", settings.ssh_identity_file] if settings.ssh_identity_file else []
    job = mpirun.Job(
        command=tuple(command),
        ranks=settings.num_proc,
        cores=launch.cores(),
        hosts=mpirun.parse_hosts(settings.hosts, settings.num_proc),
        export=tuple(sorted(name for name in env if env_util.is_exportable(name))),
        define=(
            {"NCCL_SOCKET_IFNAME": ",".join(sorted(nics))}
            if nics and "NCCL_SOCKET_IFNAME" not in env
            else {}
        ),
        mpi_args=tuple(shlex.split(settings.extra_mpi_args or "")),
        binding_args=tuple(shlex.split(settings.binding_args or "")),
        interfaces=tuple(sorted(nics or ())),
        ssh_args=tuple(ssh),
        horovod_transport=True,
        tag_output=True,
        timestamp_output=bool(settings.prefix_output_with_timestamp),
        output_path=settings.output_filename,
    )
    words = mpirun.command_line(launcher, job, env)
    if settings.verbose >= 2:
        print(shlex.join(words))
    if not settings.run_func_mode:
        os.execve(words[0], words, env)
    code = safe_shell_exec.execute(shlex.join(words), env=env, stdout=stdout, stderr=stderr)
    if code != 0:
        raise RuntimeError(f"mpirun failed with exit code {code}")
