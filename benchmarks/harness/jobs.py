"""Worker jobs as the parent sees them: started by mpirun, ordered over sockets, always ended.

Owns the processes, their descriptors, the compiling of the C program, the pausing of jobs whose own
threads would disturb others, and the files that a library leaves in /dev/shm. Never kills by name:
ranks are known by the pid that the kernel gives for their socket, on virtual nodes too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from harness.candidates import Job
from harness.layouts import BENCHMARKS, JobLayout, Testbed, rank_command
from harness.peers import (
    INTEL_MPI,
    deepspeed_library,
    intel_mpi_environment,
    mpich_environment,
    oneccl_library,
    telling_line,
    vllm_library,
)
from hsgd.base import mpi_abi
from hsgd.jobs.launch import launch, mpirun
from hsgd.jobs.launch.mpi_compiler import find_wrapper

__all__ = [
    "JobFailed",
    "Tools",
    "WorkerJob",
    "compile_native",
    "environment",
    "limited",
    "prepare",
    "raise_limit",
]

START_LIMIT_S = 180.0  # importing torch in all jobs at once on a busy machine
RANK_START_LIMIT_S, RANK_END_LIMIT_S = 2.0, 0.25  # and for each rank
ORDER_LIMIT_S = 300.0
END_LIMIT_S = 20.0
EXPORTED = ("PATH", "OMP_NUM_THREADS", "NUMPY_MADVISE_HUGEPAGE", "PYTHONPATH", "LD_LIBRARY_PATH")
EXPORTED_PREFIXES = ("HSGD_", "HOROVOD_", "GLOO_")
_PR_SET_PDEATHSIG = 1
# Descriptors of the parent of hundreds of ranks; no more: some launchers close all there may be.
ENOUGH = 8192


class JobFailed(RuntimeError):
    """A job did not start, did not answer, or died: one line saying which and why."""


@dataclass
class _Rank:
    number: int
    connection: socket.socket
    lines: TextIO
    pid: int
    pidfd: int


@dataclass(frozen=True)
class Tools:
    """What starts the ranks of a job."""

    launcher: mpirun.Launcher
    worker: tuple[str, ...]  # the command of a rank, but for the address
    bin: Path  # comes first on the ranks' PATH
    word: str = ""  # goes with each setup order
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks
    mpi_args: tuple[str, ...] = ()
    tells_hosts: bool = True


def environment(layout: JobLayout) -> dict[str, str]:
    """What the launcher and all workers get, on top of nothing: this environment with settings."""
    wanted = {"OMP_NUM_THREADS": str(max(1, launch.cores() // layout.ranks))}
    if layout.nodes > 1 and layout.crowded:
        wanted["HSGD_SPIN"] = "0"  # virtual nodes share the cores, which hsgd cannot know
    fixed = {
        "PATH": os.environ.get("PATH", os.defpath),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "NUMPY_MADVISE_HUGEPAGE": "0",  # the same pages for NumPy, torch and C
    }
    if layout.threads is not None:
        fixed["OMP_NUM_THREADS"] = str(layout.threads)
    inherited = {k: v for k, v in os.environ.items() if k not in ("HOROVOD_PLUGIN", "LD_PRELOAD")}
    return {**wanted, **inherited, **fixed}


def prepare(job: Job, folder: Path, install: bool) -> Tools:
    """Find, compile or install what the job needs; blocking. Raises JobFailed, LaunchError, or
    PeerMissing.
    """
    if job.peer in ("impi", "oneccl"):
        word = str(oneccl_library(install)) if job.peer == "oneccl" else ""
        return _prepare_intel_mpi(job, folder, install, word)
    if job.peer == "mpich":
        home = mpich_environment(install)
        path = home / "bin" / "mpirun"
        launcher = launch.identify(str(path))
        compiler = str(home / "bin" / "mpicc")
        worker = rank_command("worker", python=str(home / "bin" / "python"))
        if job.native:
            worker = [str(compile_native(folder, compiler, hsgd=False))]
        return Tools(launcher, tuple(worker), path.parent)
    variables = {"VLLM_LIBRARY": str(vllm_library(install))} if job.peer == "vllm" else {}
    word = str(deepspeed_library(install)) if job.peer == "deepspeed" else ""
    worker = rank_command("worker")
    if job.native:
        worker = [str(compile_native(folder, find_wrapper("mpicc"), hsgd=True))]
    beside = Path(sys.executable).parent
    path_first = {"PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    launcher = launch.find_launcher({**os.environ, **path_first})
    return Tools(launcher, tuple(worker), beside, word, variables)


def _prepare_intel_mpi(job: Job, folder: Path, install: bool, word: str) -> Tools:
    """Intel MPI has MPICH's binary interface: it runs the C program that MPICH compiled."""
    home = intel_mpi_environment(install)
    if job.native:
        compiler = mpich_environment(install) / "bin" / "mpicc"
        worker = [str(compile_native(folder, str(compiler), hsgd=False))]
    else:
        worker = rank_command("worker", python=str(home / "bin" / "python"))
    path = home / "bin" / "mpiexec.hydra"
    before = os.environ.get("LD_LIBRARY_PATH", "")
    libraries = f"{home / 'lib'}:{before}" if before else str(home / "lib")
    return Tools(
        mpirun.Launcher(str(path), "MPICH", INTEL_MPI),  # whose options its launcher takes
        tuple(worker),
        path.parent,
        word,
        environment={"LD_LIBRARY_PATH": libraries},
        mpi_args=("-launcher", "fork"),
        tells_hosts=False,  # it runs here without
    )


def compile_native(folder: Path, compiler: str | None, *, hsgd: bool) -> Path:
    """Build native/*.c with an mpicc, with hsgd or without; once per folder. Raises JobFailed."""
    import hsgd as package

    if compiler is None:
        raise JobFailed("no mpicc beside the interpreter or on PATH: install an MPI with headers")
    program = folder / ("worker-hsgd" if hsgd else "worker")
    if program.exists():
        return program
    sources = [p for p in sorted((BENCHMARKS / "native").glob("*.c")) if hsgd or p.stem != "hsgd"]
    words = [compiler, "-std=gnu11", "-O3", "-march=native", *map(str, sources)]
    if hsgd:
        headers, libraries = BENCHMARKS.parent / "hsgd/csrc/include", Path(package.__file__).parent
        words += ["-DWITH_HSGD", f"-I{headers}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        words += [f"-lhsgd_mpi_{mpi_abi.present()[0]}", "-lhsgd_core"]  # of the MPI that is here
    words += ["-ldl", "-o", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise JobFailed(f"benchmarks/native does not compile: {telling_line(done.stderr)}")
    return program


def raise_limit() -> str:
    """Let this process and the launchers open more; the words of `ulimit` that give ranks the limit
    that was there, which is what a user has, or "" where it stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return f"-Sn {soft}"


def limited(command: Sequence[str], ulimit: str) -> tuple[str, ...]:
    """The command with `ulimit ULIMIT` before it; as it is for ""."""
    if not ulimit:
        return tuple(command)
    return ("sh", "-c", f'ulimit {ulimit} && exec "$0" "$@"', *command)


class WorkerJob:
    """The ranks of one job. Use as a context manager: leaving it ends them."""

    def __init__(
        self, job: Job, testbed: Testbed, folder: Path, tools: Tools, ulimit: str = ""
    ) -> None:
        """Start it, each rank after `ulimit ULIMIT`."""
        self.job = job
        self.word = tools.word
        self._ranks: list[_Rank] = []
        self._awake = True
        self._segments: set[str] = set()
        self._log = folder / f"{job.name}.log"
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / f"{job.name}.socket")
        self._listener.bind(address)
        self._listener.listen(testbed.layout.ranks)
        self._expected = testbed.layout.ranks
        environ = environment(testbed.layout)
        environ["PATH"] = f"{tools.bin}{os.pathsep}{environ['PATH']}"
        environ = testbed.environment(environ)
        command = limited((*tools.worker, address), ulimit)
        plan = _plan(job, testbed, tools, command, environ)
        self.words = mpirun.command_line(tools.launcher, plan, environ)
        with self._log.open("wb") as log:
            self._mpirun = subprocess.Popen(
                testbed.command(self.words),
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt is for the parent, who ends it
                preexec_fn=_end_with_parent,
            )

    def __enter__(self) -> WorkerJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Wait until all ranks are there. Raises JobFailed."""
        deadline = time.monotonic() + START_LIMIT_S + RANK_START_LIMIT_S * self._expected
        ended = os.pidfd_open(self._mpirun.pid)
        try:
            sources = select.poll()  # select() takes descriptors below 1024 alone
            for source in (self._listener.fileno(), ended):
                sources.register(source, select.POLLIN)
            while len(self._ranks) < self._expected:
                left = deadline - time.monotonic()
                ready = [source for source, _ in sources.poll(1e3 * max(0.0, left))]
                if self._listener.fileno() not in ready:
                    raise self._failure("ended before it began" if ready else "did not start")
                self._ranks.append(self._accept())
        except (OSError, ValueError) as error:
            raise self._failure(f"did not start ({error})") from None
        finally:
            os.close(ended)
        self._ranks.sort(key=lambda rank: rank.number)
        self._note_segments()
        self._pause()

    def order(self, text: str) -> list[dict[str, Any]]:
        """Have all ranks obey one line; their answers in rank order. Raises JobFailed."""
        deadline = time.monotonic() + ORDER_LIMIT_S
        with self._woken():
            try:
                for rank in self._ranks:
                    rank.connection.sendall(f"{text}\n".encode())
                answers = []
                for rank in self._ranks:
                    rank.connection.settimeout(max(0.01, deadline - time.monotonic()))
                    answers.append(json.loads(rank.lines.readline() or "null"))
            except TimeoutError:
                limit = f"{ORDER_LIMIT_S:g} s"
                raise self._failure(f'did not answer "{text}" within {limit}') from None
            except (OSError, ValueError) as error:
                raise self._failure(f'broke off at "{text}" ({error})') from None
        if not all(isinstance(answer, dict) for answer in answers):
            raise self._failure(f'died at "{text}"')
        if text.startswith("setup "):
            self._note_segments()
        return answers

    def close(self) -> None:
        """End the ranks and mpirun, politely first; never raises."""
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.lines.close()
                rank.connection.close()  # a rank that still listens reads the end
        self._listener.close()
        for stop in (None, self._mpirun.terminate, self._mpirun.kill):
            if stop is not None:
                stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpirun.wait(END_LIMIT_S + RANK_END_LIMIT_S * self._expected)
                break
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            os.close(rank.pidfd)
        self._ranks = []
        for name in self._segments:
            with contextlib.suppress(OSError):
                os.unlink(name)

    def _accept(self) -> _Rank:
        connection, _ = self._listener.accept()
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid = struct.unpack("3i", credentials)[0]
        connection.settimeout(START_LIMIT_S)
        lines = connection.makefile("r", encoding="utf-8")
        return _Rank(int(lines.readline()), connection, lines, pid, os.pidfd_open(pid))

    def _note_segments(self) -> None:
        """Files in /dev/shm that a rank maps: an MPI whose ranks are killed leaves them behind."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{rank.pid}/maps").read_text()
                self._segments |= set(re.findall(r"(/dev/shm/\S+)$", maps, re.M))

    @contextlib.contextmanager
    def _woken(self) -> Iterator[None]:
        if self.job.pauses and not self._awake:
            self._signal(signal.SIGCONT)
            self._awake = True
        yield
        self._pause()

    def _pause(self) -> None:
        if self.job.pauses:
            self._signal(signal.SIGSTOP)
            self._awake = False

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, number)

    def _failure(self, what: str) -> JobFailed:
        code = self._mpirun.poll()
        ending = "" if code is None else f" (exit code {code})"
        reason = telling_line(self._log.read_text(errors="replace"))
        because = f": {reason}" if reason else ""
        return JobFailed(f"the {self.job.name} job {what}{ending}{because}")


def _plan(
    job: Job, testbed: Testbed, tools: Tools, command: tuple[str, ...], environ: dict[str, str]
) -> mpirun.Job:
    """The job in the launcher's words."""
    crowded = job.crowded if testbed.layout.crowded else {}
    define = {**job.environment, **crowded, **tools.environment}
    if job.interface_variable:
        define[job.interface_variable] = testbed.interface or "lo"
    several, mpich = testbed.interface is not None, job.peer == "mpich"
    exported = {n for n in environ if n in EXPORTED or n.startswith(EXPORTED_PREFIXES)}
    return mpirun.Job(
        command=command,
        ranks=testbed.layout.ranks,
        cores=testbed.cores_of_a_host,
        hosts=mpirun.parse_hosts(testbed.hosts, testbed.layout.ranks) if tools.tells_hosts else (),
        export=tuple(sorted(exported - define.keys())) if several else (),
        define=define,
        mpi_args=("-iface", str(testbed.interface)) if several and mpich else tools.mpi_args,
        interfaces=(str(testbed.interface),) if several else (),
    )


def _end_with_parent() -> None:
    """In the child before exec: mpirun gets SIGTERM, and ends its ranks, when this process dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
