"""Jobs of one program under mpirun: ranks get a plan, and rank 0 writes a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.layouts import JobLayout, Testbed, open_testbed, rank_command
from hsgd.errors import LaunchError

__all__ = ["WorkerJobs"]

END_S = 20.0  # mpirun needs a while to end its ranks


class WorkerJobs:
    """Runs workers (serving.py) on layouts; what fails becomes a line, not an end."""

    def __init__(self, worker: str, folder: Path, limit_s: float) -> None:
        self.worker, self.out, self.limit_s = worker, folder / "out.json", limit_s
        self.failures: list[str] = []

    def written(self) -> Any:
        """What rank 0 of the last job has written so far; None before it has."""
        return json.loads(self.out.read_text()) if self.out.exists() else None

    def run(
        self,
        layout: JobLayout,
        plan: Mapping[str, Any],
        worker: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """What rank 0 wrote; None when the job failed. `worker`: in place of the usual one.
        `environment`: more of it, of the ranks.
        """
        self.out.unlink(missing_ok=True)
        try:
            with open_testbed(layout) as testbed:
                words = json.dumps(plan)
                command = rank_command(worker or self.worker, str(self.out), words)
                code, log = self._finish(testbed, command, environment or {})
            if code == 0:
                return self.written()
            reason = [line for line in log.splitlines() if "rror:" in line][-1:]
        except (LaunchError, subprocess.TimeoutExpired, OSError) as error:
            reason = [str(error)]
        what = " ".join(str(value) for value in plan.values())
        self.failures.append(f"{layout.name} {what}: {''.join(reason)[:300]}")
        return None

    def _finish(
        self, testbed: Testbed, words: Sequence[str], more: Mapping[str, str]
    ) -> tuple[int, str]:
        """Exit code and what was said. However this ends, mpirun is told to end its ranks."""
        with subprocess.Popen(
            testbed.command([*_mpirun(testbed.layout, testbed.hosts, more), *words]),
            env=testbed.environment(_environment()),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                _, log = process.communicate(timeout=self.limit_s)
            except BaseException:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=END_S)
                process.kill()
                raise
        return process.returncode, log


def _mpirun(layout: JobLayout, hosts: str, more: Mapping[str, str]) -> list[str]:
    beside = Path(sys.executable).parent
    words = [str(beside / "mpirun"), "-np", str(layout.ranks), "--host", hosts]
    words += ["--map-by", "slot", "--bind-to", "none", "--prefix", str(beside.parent)]
    if layout.nodes > 1:
        words += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "btl_tcp_links", "4"]
        words += ["-x", "GLOO_SOCKET_IFNAME=eth0"]
    else:
        words += ["--oversubscribe"]
    # The engine's thread and the program's share cores on virtual nodes.
    words += ["--mca", "mpi_yield_when_idle", "1"]
    words += ["-x", "OMP_NUM_THREADS=1", "-x", "PATH"]
    for name, value in more.items():
        words += ["-x", f"{name}={value}"]
    return words


def _environment() -> dict[str, str]:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "PATH": beside}
