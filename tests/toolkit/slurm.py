"""Slurm: a real Slurm on the virtual nodes of a cluster, for tests of what users type there.

slurmctld and munged run on login, a slurmd on each node, with a key, a configuration and folders of
their own in the cluster's /run; they end with the cluster. Needs Debian's slurm-wlm
and munge.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.cluster import Cluster, ClusterError
from toolkit.processes import run_marked

__all__ = ["Slurm"]

FOLDER = "/run/slurm"  # as login and nodes see it
SETUP_S = 60.0
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun")
_SBIN = "/usr/sbin:/sbin"
_CONFIG = """\
ClusterName=virtual
SlurmctldHost=login(10.99.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=1
KillWait=5
MessageTimeout=30
TreeWidth=50
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


class Slurm:
    """Slurm on `nodes` new virtual nodes with `cpus` each, ready for use; a context manager.

    Raises ClusterError.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4) -> None:
        if reason := self.reason_unavailable():
            raise ClusterError(reason)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._cluster = Cluster(nodes)
        try:
            self._set_up(cpus)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster and all that runs in it."""
        self._cluster.close()
        for daemon in self._daemons:
            daemon.wait(SETUP_S)

    def _set_up(self, cpus: int) -> None:
        cluster = self._cluster
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=10.99.0.{k} CPUs={cpus} State=UNKNOWN"
            for k, name in enumerate(cluster.nodes, 1)
        )
        self._run = Path(f"/proc/{cluster.pid}/root/run")  # a file system of the cluster
        folder = self._run / "slurm"
        for part in (folder, folder / "state"):
            part.mkdir(mode=0o755)
        (folder / "slurm.conf").write_text(_CONFIG.format(folder=FOLDER, nodes=nodes))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        self._start_munged()
        self._start(["slurmctld", "-D", "-f", f"{FOLDER}/slurm.conf"], None)
        for node, name in enumerate(cluster.nodes, 1):
            self._start(["slurmd", "-D", "-N", name, "-f", f"{FOLDER}/slurm.conf"], node)
        self._wait_until_idle()

    @staticmethod
    def reason_unavailable() -> str | None:
        """Return why this machine cannot run Slurm; None if it can."""
        if reason := Cluster.reason_unavailable():
            return reason
        path = f"{os.environ.get('PATH', os.defpath)}:{_SBIN}"
        missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
        return f"no {', '.join(missing)}; install slurm-wlm and munge" if missing else None

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of commands on login; see Cluster.environment."""
        return self._cluster.environment({"SLURM_CONF": f"{FOLDER}/slurm.conf", **(env or {})})

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run argv, as srun or sbatch, on login, and wait; raises CommandTimeout."""
        return run_marked(self._cluster.command(argv), self.environment(env), timeout_s)

    def batch(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Submit the job of sbatch's words and wait for its end; returncode is the job's.

        `sbatch --wait` looks every half a minute only. Raises ClusterError.
        """
        done = self.run(["sbatch", "--parsable", *argv], env=env)
        if done.returncode == 0:
            self.wait_until_over(timeout_s)
            shown = self.run(["scontrol", "-o", "show", "job", done.stdout.strip()]).stdout
            codes = re.findall(r" ExitCode=(\d+):(\d+)", shown)
            if not codes:
                raise ClusterError(f"Slurm: no exit code of job {done.stdout.strip()}: {shown}")
            done.returncode = max(int(code) or int(signal) for code, signal in codes)
        return done

    def wait_until_over(self, timeout_s: float = 120.0) -> None:
        """Wait until there is no job any more, completing ones included. Raises ClusterError."""
        end = time.monotonic() + timeout_s
        while True:
            found = self.run(["squeue", "-h"])
            if found.returncode == 0 and not found.stdout:
                return
            if time.monotonic() > end:
                said = f"{found.stdout}{found.stderr}"
                raise ClusterError(f"Slurm: after {timeout_s:g} s there is still {said}")
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        folder = self._run / "slurm"
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(folder.glob("*.log"))
        )

    def _start_munged(self) -> None:
        """Start one for all nodes, which share /run; Slurm and hsgd look at this place."""
        (self._run / "munge").mkdir(mode=0o755)
        words = f"--key-file={FOLDER}/munge.key --foreground --num-threads=2"
        for name in ("socket=munge.socket.2", "pid-file=pid", "log-file=log", "seed-file=seed"):
            option, _, file = name.partition("=")
            words += f" --{option}=/run/munge/{file}"
        self._start(["munged", *words.split()], None)

    def _start(self, argv: Sequence[str], node: int | None) -> None:
        self._daemons.append(
            subprocess.Popen(
                self._cluster.command(argv, node),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def _wait_until_idle(self) -> None:
        end = time.monotonic() + SETUP_S
        while True:
            done = self.run(["sinfo", "-h", "-o", "%T %D"])
            if done.returncode == 0 and done.stdout.split() == [
                "idle",
                str(len(self._cluster.nodes)),
            ]:
                return
            if time.monotonic() > end:
                raise ClusterError(f"Slurm: not ready: {done.stdout}{done.stderr}\n{self.logs()}")
            time.sleep(0.2)
