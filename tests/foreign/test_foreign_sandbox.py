"""hsgd in sandboxes: system calls that a filter refuses, PID namespaces, small limits, cgroups.

Owns the folders of cgroups that it makes. Ranks are those of foreign_programs.py; each takes its
limits itself, the namespaces are made by unshare(1).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreign_ranks import run_ranks

__all__: list[str] = []

# The rank ($3) has another number in its namespace than its peers have in theirs.
WITH_ITS_NUMBER = 'echo ${3}00 >/proc/sys/kernel/ns_last_pid; "$0" "$@"; exit $?'
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OTHER_PIDS = (*OWN_PIDS, "sh", "-c", WITH_ITS_NUMBER)
SMALL_SHM = ("unshare", "--mount", "sh", "-c")
NOBODY = 65534


@pytest.mark.parametrize("code", ["ENOSYS", "EPERM"])
def test_ranks_of_other_pid_namespaces_live_where_pidfds_are_refused(code: str) -> None:
    output = run_ranks(f"refuse={code}", prefix=OTHER_PIDS)
    assert all(line.startswith("all is well") for line in output), output


@pytest.mark.parametrize("prefix", [(), OTHER_PIDS], ids=["same pids", "own pids"])
def test_a_death_is_told_before_the_deadline_where_pidfds_are_refused(
    prefix: tuple[str, ...],
) -> None:
    output = run_ranks("dies", "refuse=ENOSYS", size=3, prefix=prefix)
    for line in (output[0], output[2]):
        assert re.match(r"PeerLost: barrier #2: rank 1 \(pid \d+, .+\) died", line), line


def test_an_ordinary_user_with_few_files_and_a_small_dev_shm() -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"'
    output = run_ranks("files=80", f"uid={NOBODY}", prefix=(*SMALL_SHM, mount))
    assert all(line.startswith("all is well") for line in output), output


def test_too_little_room_for_addresses_is_an_error_with_numbers() -> None:
    for line in "".join(run_ranks("asks", f"addresses={400 << 20}", size=1)).splitlines():
        begin = "SharedMemoryError: rank 0: shared memory: mapping 1073741824 bytes failed"
        assert line.startswith(begin), line
        assert re.search(r"\(ulimit -v: \d+\) in \d+ mappings \(vm.max_map_count: \d+\)", line)
        assert line.endswith("raise ulimit -v")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup below this process's own that allows 128 MiB, of version 1 or 2."""
    folder = _memory_cgroup() / f"hsgd-test-{os.getpid()}"
    limit = "memory.limit_in_bytes"
    try:
        folder.mkdir()
        if not (folder / limit).exists():
            limit = "memory.max"
        (folder / limit).write_text(str(128 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    yield folder
    folder.rmdir()


def _memory_cgroup() -> Path:
    """Where this process's cgroup of the memory controller is mounted."""
    own = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        top, place = before.split()[3:5]
        kind, _, options = after.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(place + "/" + own["memory"].removeprefix(top))
    return Path("/sys/fs/cgroup" + own[""])


def test_the_limit_of_the_own_cgroup_is_an_error_and_kills_nobody(small_cgroup: Path) -> None:
    for line in "".join(run_ranks("asks", f"cgroup={small_cgroup}")).splitlines():
        assert line.startswith("SharedMemoryError"), line
        left = re.search(r"2 x (\d+) bytes are needed and (\d+) are left", line)
        assert left is not None or "its own error says why" in line, line
        assert left is None or int(left.group(2)) <= 128 << 20
