"""What srun, PALS and Flux tell their ranks, as recorded, and the store in which they meet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from hsgd.errors import CollectiveTimeout
from hsgd.jobs.environment.launcher_variables import describe
from hsgd.jobs.environment.scheduled_step import (
    ScheduledStep,
    claim_rank,
    pmi_variables,
    scheduled_step,
)
from hsgd.jobs.stores import munge, step_store
from hsgd.jobs.stores.sealed_store import ForeignValue
from hsgd.jobs.stores.step_server import StepServer

__all__: list[str] = []

SLURM = {
    "SLURM_CLUSTER_NAME": "virtual",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}
PALS = {"PALS_RANKID": "1", "PALS_SIZE": "2", "PALS_LOCAL_SIZE": "2", "PALS_APID": "a-b/c"}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "ƒABC"}


def test_variables_of_each_scheduler_are_read(tmp_path: Path) -> None:
    step = scheduled_step(SLURM)
    assert step is not None and (step.rank, step.size) == (3, 4)
    assert step.hosts == ("node1", "node2") and not step.is_on_one_node
    hosts = tmp_path / "hosts"
    hosts.write_text("a\na\nb\n")
    pals = scheduled_step({**PALS, "PBS_NODEFILE": str(hosts)})
    assert pals is not None and pals.hosts == ("a", "b") and pals.is_on_one_node
    flux = scheduled_step(FLUX)
    assert flux is not None and (flux.rank, flux.size, flux.hosts) == (1, 2, ())
    names = [step.name, pals.name, flux.name]
    assert len(set(names)) == 3 and not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", "8"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_RESTART_COUNT", "1"),
        ("SLURM_CLUSTER_NAME", "other"),
        ("SLURM_HET_JOB_ID", "6"),
    ],
)
def test_each_launch_has_a_name_of_its_own(name: str, value: str) -> None:
    one, other = scheduled_step(SLURM), scheduled_step({**SLURM, name: value})
    assert one is not None and other is not None and one.name != other.name


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {name: SLURM[name] for name in SLURM if name != "SLURM_JOB_ID"},
        {name: PALS[name] for name in PALS if name != "PALS_APID"},
        {**SLURM, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
    ],
)
def test_other_processes_belong_to_no_step(environ: dict[str, str]) -> None:
    assert scheduled_step(environ) is None


def test_hsgd_info_says_how_the_ranks_meet() -> None:
    assert "TCP" in describe(SLURM) and "by srun (SLURM_PROCID=3" in describe(SLURM)
    assert describe({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).startswith("shared memory of this node")


def test_what_a_scheduler_offers_to_mpi_is_seen() -> None:
    assert pmi_variables(SLURM) == []
    assert pmi_variables({**SLURM, "PMI_FD": "11", "PMIX_RANK": "0"}) == ["PMI_FD", "PMIX_RANK"]


def test_a_second_process_of_a_rank_is_refused(tmp_path: Path) -> None:
    """As a child that inherits the variables: two of them would form a job of their own."""
    one = step("claimed", 2)
    claim_rank(one)
    claim_rank(one)  # by the same process
    code = f"""
from hsgd.jobs.environment.scheduled_step import ScheduledStep, claim_rank
claim_rank(ScheduledStep({one.name!r}, "srun", 1, 2, (), False))
claim_rank(ScheduledStep({one.name!r}, "srun", 0, 2, (), False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "another process of this node is rank 0 of srun" in done.stderr.splitlines()[-1]


# --- the store ---


def step(name: str, size: int) -> ScheduledStep:
    return ScheduledStep(f"{name}-{os.getpid()}", "srun", 0, size, (), False)


def test_ranks_meet_by_a_private_file_that_then_goes(tmp_path: Path) -> None:
    whole, folder = step("meet", 3), tmp_path / "steps"

    def rank(number: int) -> bytes:
        time.sleep(0.1 * (2 - number))
        store = step_store.step_store(replace(whole, rank=number), str(folder), 30)
        store.set(f"from {number}", f"I am {number}")
        store.wait([f"from {each}" for each in range(3)], timedelta(seconds=30))
        assert store.check(["from 1"]) and not store.check(["from 1", "from 9"])
        with pytest.raises(TimeoutError):
            store.wait(["from 9"], timedelta(seconds=0.05))
        if number == 2:
            assert store.add("turns", 2) == 2
            store.append("list", "a")
            store.append("list", "b")
            assert store.get("list") == b"ab"
        return store.get(f"from {(number + 1) % 3}")

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(rank, range(3))] == [b"I am 1", b"I am 2", b"I am 0"]
    assert [*folder.iterdir()] == [] and folder.stat().st_mode & 0o77 == 0


def test_a_rank_that_finds_nobody_says_where_it_looked(tmp_path: Path) -> None:
    lost = replace(step("lost", 2), rank=1, hosts=("127.0.0.1",))
    with pytest.raises(CollectiveTimeout) as told:
        step_store.step_store(lost, str(tmp_path), 0.3)
    assert told.value.rank == 0
    for words in (f"{tmp_path}/{lost.name}", "No such file", "127.0.0.1 port ", "HSGD_STEP_DIR"):
        assert words in str(told.value)


@pytest.mark.parametrize("fault", ["open to others", "a link", "another secret", "no JSON"])
def test_a_file_or_port_of_a_stranger_is_not_used(tmp_path: Path, fault: str) -> None:
    whole = step(fault.replace(" ", "_"), 2)
    server = StepServer(whole.name, [], 2, lambda: None)
    path = tmp_path / whole.name
    secret = "0" * 64 if fault == "another secret" else server.secret
    told = json.dumps({"port": server.port, "secret": secret, "hosts": []})
    where = tmp_path / "elsewhere" if fault == "a link" else path
    where.write_text("{" if fault == "no JSON" else told)
    where.chmod(0o644 if fault == "open to others" else 0o600)
    if fault == "a link":
        path.symlink_to(where)
    with pytest.raises(CollectiveTimeout, match="was not found"):
        step_store.step_store(replace(whole, rank=1), str(tmp_path), 0.2)
    server.close()


def test_a_stranger_that_drips_holds_nobody(tmp_path: Path) -> None:
    whole = step("drips", 2)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def drip() -> None:
            while True:
                try:
                    visitor, _ = door.accept()
                except OSError:
                    return
                with visitor, contextlib.suppress(OSError):
                    while True:
                        visitor.sendall(b"x")
                        time.sleep(0.2)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        told = {"port": door.getsockname()[1], "secret": "0" * 64, "hosts": []}
        (tmp_path / whole.name).write_text(json.dumps(told))
        (tmp_path / whole.name).chmod(0o600)
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"too slow|timed out"):
            step_store.step_store(replace(whole, rank=1), str(tmp_path), 1.0)
        assert time.monotonic() - begin < 60


def test_strangers_at_the_port_get_nothing_and_disturb_nobody(tmp_path: Path) -> None:
    whole = step("strangers", 2)
    store = step_store.step_store(whole, str(tmp_path), 30)
    port = store._store._lines._connection.getpeername()[1]
    store.set("key", "value")
    deep, credential = b"[" * 5000 + b"\n", b'{"nonce": 1, "rank": 0, "credential": {}}\n'
    forged = b'{"nonce": "a", "rank": 1, "proof": "b"}\n'
    for words in (b"", b"{}\n", forged, b"x" * 10_000, b"[1]\n", deep, credential):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            assert b"nonce" in stranger.recv(1000)
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1000) == b""
    idle = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(300)]
    assert store.get("key") == b"value"
    for each in idle:
        each.close()
    store._store.set("key", "=forged")
    with pytest.raises(ForeignValue):
        store.get("key")


def test_the_thread_of_the_store_ends_with_it_though_a_child_lives_on() -> None:
    server = StepServer("end", [], 1, lambda: None)
    assert any(each.name == "hsgd-step-store" for each in threading.enumerate())
    child = subprocess.Popen(["sleep", "600"], close_fds=False)  # as a fork, has copies
    for each in (server._wake, server._woken):
        os.set_inheritable(each.fileno(), True)
    other = subprocess.Popen(["sleep", "600"], close_fds=False)
    server.close()
    for each in (child, other):
        assert each.poll() is None
        each.kill()
        each.wait()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port), 1)


def test_without_its_library_munge_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    munge._library.cache_clear()
    monkeypatch.setattr(munge, "_LIBRARY", "libnone.so")
    assert not munge.is_usable()
    with pytest.raises(munge.MungeError, match=r"libnone\.so"):
        munge.seal_for_own_user(b"")
    munge._library.cache_clear()
