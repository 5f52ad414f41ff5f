"""Commands whose processes can all be found again: in other sessions, as daemons, in namespaces.

Every process of a run carries a mark in its environment, so a run that hangs ends completely, and a
test can prove that nothing is left. Never looks for processes by name, and never touches one
without the mark. Linux only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.virtual_nodes import MARK

__all__ = [
    "MARK",
    "CommandTimeout",
    "crashes_of",
    "end_marked",
    "kill_soon",
    "launch_environ",
    "marked",
    "outliving",
    "run_marked",
    "run_together",
]

KILL_S = 30.0  # a killed process that takes longer to go is reported

_serial = itertools.count(1)


class CommandTimeout(TimeoutError):
    """A command ran past its limit and was ended; the message closes with its last output and the
    processes that still ran.

    programs: names of the files that these processes were executing.
    """

    def __init__(self, message: str, programs: Iterable[str]) -> None:
        super().__init__(message)
        self.programs = frozenset(programs)


def crashes_of(errors: str) -> str:
    """The signals and the innermost frames of the traces that Open MPI printed, and no more."""
    frame = re.compile(r"\*\*\* |Signal|\[ ?[0-9]\] |\[1[0-2]\] ")
    return "\n".join(
        line for line in errors.splitlines() if line.startswith("[") and frame.search(line)
    )


def run_marked(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run argv and capture its text; past the limit, end all it started, raise CommandTimeout,
    which says what still ran.

    The command has a TMPDIR of its own unless `env` names another than ours: a killed mpirun of
    Open MPI 5 leaves a folder with its pid in the name, on which a later one of this pid fails.
    """
    mark = f"{os.getpid()}.{next(_serial)}."
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            argv,
            env={**env, "TMPDIR": _other_folder(env) or folder, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            left = marked(mark)
            alive, programs = "\n".join(map(_described, left)), set(map(_program, left))
            end_marked(mark)
            out, err = process.communicate(timeout=KILL_S)
            tail = "\n".join((out + err).splitlines()[-40:])
            message = f"{shlex.join(argv)}: not finished after {timeout_s:g} s, ended"
            text = f"{message}; last output:\n{tail}\nstill ran:\n{alive}"
            raise CommandTimeout(text, programs) from None
        except BaseException:
            end_marked(mark)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def run_together(
    commands: Iterable[Sequence[str]], env: Mapping[str, str], timeout_s: float
) -> list[subprocess.CompletedProcess[str]]:
    """run_marked() of all commands at once: ranks that need one another."""
    with ThreadPoolExecutor(64) as threads:
        runs = [threads.submit(run_marked, argv, env, timeout_s) for argv in commands]
        return [run.result() for run in runs]


def kill_soon(
    commands: Sequence[Sequence[str]], first: str, luck: random.Random, most_s: float
) -> list[str]:
    """Start all, and when each has printed the line `first`, kill one after another, each within
    `most_s`; what they printed meanwhile. One may have ended well before.
    """
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == f"{first}\n"
    printed = []
    for process in processes:
        try:  # a moment for what it does until it is killed
            process.wait(luck.uniform(0, most_s))
        except subprocess.TimeoutExpired:
            process.kill()
        printed.append(process.communicate()[0])
        assert process.returncode in (0, -signal.SIGKILL)
    return printed


def launch_environ(**more: str) -> dict[str, str]:
    """For commands that call mpirun by themselves: more ranks than cores, as root, this Python."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _other_folder(env: Mapping[str, str]) -> str | None:
    folder = env.get("TMPDIR")
    return None if folder == os.environ.get("TMPDIR") else folder


def marked(prefix: str) -> list[int]:
    """Living processes whose mark begins with `prefix`; "PID." finds all that process PID ran."""
    needle = f"\0{MARK}={prefix}".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if needle in b"\0" + Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
    return found


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return "gone"


def _described(pid: int) -> str:
    """What a process runs and where each of its threads waits in the kernel."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:6]
        waits = [path.read_text() or "?" for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
    except OSError:
        return f"{pid}: gone"
    return f"{pid}: {b' '.join(words).decode(errors='replace')[:200]} (in {', '.join(waits)})"


def end_marked(prefix: str) -> None:
    """SIGKILL the processes with the mark, and what they fork meanwhile, until none is left."""
    deadline = time.monotonic() + KILL_S
    while pids := marked(prefix):
        for pid in pids:
            with _pidfd(pid) as fd:
                if fd is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
        stuck = outliving(pids, deadline - time.monotonic())
        if stuck:
            raise RuntimeError(
                f"processes {stuck} outlive SIGKILL by {KILL_S:g} s; look at them with ps"
            )


def outliving(pids: Iterable[int], grace_s: float) -> list[int]:
    """Those of the processes that are still alive after at most `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    alive = []
    for pid in pids:
        with _pidfd(pid) as fd:
            if fd is not None:
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                if not ended.poll(1000 * max(0.0, deadline - time.monotonic())):
                    alive.append(pid)
    return alive


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    """A handle of the process that survives reuse of its pid; None when it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
