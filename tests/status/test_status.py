"""`hsgd status` on small jobs: who is late, stopped, silent or gone, and what cannot be read."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd import Comm
from hsgd.errors import HsgdError
from hsgd.tools.cli import main
from hsgd.tools.status import looking, page
from pretended_nodes import meet
from ranks import LIMIT_S, PATIENT, Ranks, Seat, meeting_point

SIZE = 4


class Command:
    """The command in this process, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main(["status", *map(str, words)])
        return code, *self._capsys.readouterr()

    def table(self, *words: object) -> str:
        code, out, err = self(*words)
        assert (code, err) == (0, "")
        return out

    def comms(self, *words: object) -> list[dict[str, Any]]:
        return json.loads(self.table("--json", *words))["communicators"]  # type: ignore[no-any-return]

    def until(self, holds: Callable[[dict[str, Any]], bool], pid: int) -> dict[str, Any]:
        """The first communicator of a process, once that holds of it."""
        end = time.monotonic() + LIMIT_S
        while True:
            _, out, err = self("--json", pid)
            comms = json.loads(out)["communicators"] if out else []
            if comms and holds(comms[0]):
                return comms[0]  # type: ignore[no-any-return]
            assert time.monotonic() < end, out or err

    def line(self, *words: object) -> str:
        """What it fails with."""
        code, out, err = self(*words)
        assert (code, out) == (1, "")
        assert err.startswith("hsgd: error: ") and err.count("\n") == 1
        return err


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def standings(comm: dict[str, Any]) -> list[str]:
    return [rank["standing"] for rank in comm["ranks"]]


def do_call(seat: Seat, path: str, late: int) -> float:
    """One allreduce together, then one to which rank `late` comes when it is told to."""
    comm = seat.comm(path, SIZE)
    comm.allreduce(np.ones(3), name="first")
    if seat.rank == late:
        seat.tell("late")
        seat.pipe.recv()
    return float(comm.allreduce(np.ones(1000, np.float32), name="fc.weight")[0])


def test_a_rank_that_is_late_is_named(ranks: Ranks, status: Command) -> None:
    ranks.start(do_call, meeting_point(), 2)
    assert ranks.hear(2) == "late"
    comm = status.until(
        lambda comm: standings(comm) == ["waits", "waits", "late", "waits"], ranks.pid(0)
    )
    assert (comm["held_up_by"], comm["held_up"], comm["size"]) == ([2], True, SIZE)
    assert [rank["pid"] for rank in comm["ranks"]] == [ranks.pid(rank) for rank in range(SIZE)]
    first = comm["ranks"][0]
    assert (first["kind"], first["call"], first["name"]) == ("allreduce", 2, "fc.weight")
    assert (first["bytes"], first["finished_calls"], first["waits_for"]) == (4000, 1, 2)
    assert first["since_s"] >= first["waits_since_s"] - 0.01 and first["last_look_s"] < 1
    late = comm["ranks"][2]
    assert (late["in_call"], late["call"], late["name"]) == (False, 1, "first")
    table = status.table(ranks.pid(3))  # whichever rank is asked about
    assert re.search(rf"^ +2 +{ranks.pid(2)} +LATE .* none, after allreduce #1", table, re.M)
    assert re.search(r'^ +0 .* waits .* allreduce #2 "fc.weight", 3.9 KiB +rank 2, ', table, re.M)
    assert (
        f"-> rank 2 (pid {ranks.pid(2)}, {os.uname().nodename}) has not called "
        'allreduce #2 "fc.weight", in which 3 ranks wait, the first for '
    ) in table
    ranks.send(2, "go")
    assert [outcome.value for outcome in ranks.finish()] == [SIZE] * SIZE
    assert status.until(lambda comm: not comm["held_up"], ranks.pid(0))["findings"] == []
    assert "no rank waits for another" in status.table(ranks.pid(0))


def test_a_stopped_rank_is_named_and_can_be_read(ranks: Ranks, status: Command) -> None:
    path = meeting_point()
    ranks.start(do_call, path, 1)
    assert ranks.hear(1) == "late"
    ranks.stop(1)
    comm = status.until(lambda comm: standings(comm).count("waits") == 3, ranks.pid(1))
    assert (comm["held_up_by"], standings(comm)[1]) == ([1], "stopped")
    assert "its process is stopped (kill -CONT continues it)" in comm["findings"][0]
    ranks.signal(1, signal.SIGCONT)
    ranks.send(1, "go")
    ranks.finish()


def do_hang(seat: Seat, path: str) -> None:
    """Rank 1 hangs inside of a call in which it waited; the last rank comes when it is told to."""
    comm = seat.comm(path, SIZE)

    def hang(*_: object) -> None:
        seat.tell("hangs")
        seat.pipe.recv()

    if seat.rank == 1:
        signal.signal(signal.SIGUSR1, hang)
    if seat.rank == SIZE - 1:
        seat.tell("late")
        seat.pipe.recv()
    comm.barrier()


def test_a_rank_that_waited_and_then_hangs_is_named(ranks: Ranks, status: Command) -> None:
    ranks.start(do_hang, meeting_point())
    assert ranks.hear(SIZE - 1) == "late"
    status.until(lambda comm: standings(comm) == ["waits"] * 3 + ["late"], ranks.pid(0))
    ranks.signal(1, signal.SIGUSR1)
    assert ranks.hear(1) == "hangs"
    expected = ["waits", "silent", "waits", "late"]
    comm = status.until(lambda comm: standings(comm) == expected, ranks.pid(0))
    assert comm["held_up_by"] == [SIZE - 1, 1]  # who did not come, then who does not go on
    assert "is in barrier #1, in which 2 ranks wait" in comm["findings"][1]
    assert "has not looked at the others for " in comm["findings"][1]
    for rank in (1, SIZE - 1):
        ranks.send(rank, "go")
    ranks.finish()


def do_cross(seat: Seat, one: str, two: str) -> None:
    """Each of two ranks waits in another communicator; the rest stay out of it."""
    comms = [seat.comm(path, 2) for path in (one, two)]
    seat.tell("met")
    seat.pipe.recv()
    comms[seat.rank].barrier()
    comms[1 - seat.rank].barrier()


def test_ranks_that_wait_for_one_another_in_two_communicators(
    ranks: Ranks, status: Command
) -> None:
    ranks.start(do_cross, meeting_point(), meeting_point(), on=(0, 1))
    for rank in (0, 1):
        assert ranks.hear(rank) == "met"
        ranks.send(rank, "go")
    status.until(lambda comm: comm["held_up"], ranks.pid(0))
    both = status.comms(ranks.pid(0))
    while not all(comm["held_up"] for comm in both):
        both = status.comms(ranks.pid(0))
    assert {tuple(comm["held_up_by"]) for comm in both} == {(0,), (1,)}
    for comm, other in (both, reversed(both)):
        rank = 1 - comm["held_up_by"][0]
        end = f"it waits itself for rank {rank}, in barrier #1 of communicator {other['comm']}"
        assert comm["findings"][0].endswith(end)
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGINT)
    ranks.finish(on=(0, 1))


def do_work(seat: Seat, path: str) -> int:
    comm, calls = seat.comm(path, SIZE), 0
    seat.tell("works")
    while comm.allreduce(np.array([float(seat.rank == 0 and seat.pipe.poll())]))[0] == 0:
        calls += 1
    return calls


def test_a_job_that_runs_is_not_held_up(ranks: Ranks, status: Command) -> None:
    ranks.start(do_work, meeting_point())
    assert [ranks.hear(rank) for rank in range(SIZE)] == ["works"] * SIZE
    first = status.comms(ranks.pid(0))[0]
    assert first["held_up_by"] == []
    done = first["ranks"][0]["finished_calls"]
    comm = status.until(lambda comm: comm["ranks"][0]["finished_calls"] > done, ranks.pid(0))
    assert comm["comm"] == first["comm"]
    ranks.send(0, "stop")
    ranks.finish()


def do_come(seat: Seat, path: str) -> None:
    Comm.local(path, seat.rank, SIZE, PATIENT).close()


def test_a_rank_that_does_not_come_to_the_set_up_is_named(ranks: Ranks, status: Command) -> None:
    path = meeting_point()
    ranks.start(do_come, path, on=(0, 1, 3))
    comm = status.until(lambda comm: len(comm["ranks"]) == 3, ranks.pid(0))
    assert standings(comm) == ["set-up"] * 3 and comm["held_up_by"] == [2]
    assert "local rank 2 of 4 on this node did not join the set-up" in comm["findings"][0]
    ranks.start(do_come, path, on=(2,))
    ranks.finish()


def do_keep_a_broken_one(seat: Seat, path: str) -> str:
    comm = seat.comm(path, SIZE)
    seat.tell("ready")
    try:
        while True:
            comm.allreduce(np.ones(10))
    except HsgdError as error:
        return str(error)


def test_a_broken_communicator_says_why(ranks: Ranks, status: Command) -> None:
    ranks.start(do_keep_a_broken_one, meeting_point())
    for rank in range(SIZE):
        ranks.hear(rank)
    ranks.signal(3, signal.SIGKILL)
    errors = [outcome.value for outcome in ranks.finish(on=(0, 1, 2))]
    comm = status.comms(ranks.pid(0))[0]
    assert standings(comm) == ["broken"] * 3 and comm["unseen"] == [3]
    assert [rank["error"] for rank in comm["ranks"]] == errors
    assert [rank["error_rank"] for rank in comm["ranks"]] == [3] * 3
    assert f"broken since {comm['ranks'][0]['since_s']:.1f} s: {errors[0]}" in comm["findings"][0]


def do_open_and_close(seat: Seat, path: str) -> list[int]:
    """Pages that this process has open: before, with a communicator, with two, after."""

    def count() -> int:
        names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        links = [os.readlink(name) for name in names if os.path.islink(name)]
        return sum("status-of-hsgd" in link for link in links)

    counts = [count()]
    for turn in range(3):
        with Comm.local(f"{path}-{turn}", seat.rank, 2, PATIENT) as comm:
            counts.append(count())
            part = comm.split(0)
            assert part is not None
            with part:
                counts.append(count())
        counts.append(count())
    return counts


def test_a_process_has_one_page_while_it_has_communicators(ranks: Ranks, status: Command) -> None:
    for counts in ranks.run(do_open_and_close, meeting_point(), on=range(2)):
        assert counts == [0, *[1, 1, 0] * 3]
    assert "it has made none yet, or has finished and closed them" in status.line(ranks.pid(0))


def do_fork(seat: Seat, path: str) -> None:
    """A child has the descriptors of its parent, and then a communicator of its own."""
    comm = seat.comm(path, 1)
    child = os.fork()
    if child == 0:
        seat.tell(os.getpid())
        seat.pipe.recv()
        own = Comm.local(f"{path}-child", 0, 1, PATIENT)
        own.barrier()
        seat.tell("made")
        seat.pipe.recv()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    comm.barrier()


def test_a_forked_child_is_no_rank_of_its_parents(ranks: Ranks, status: Command) -> None:
    ranks.start(do_fork, meeting_point(), on=(0,))
    child = ranks.hear(0)
    assert "has no open communicator" in status.line(child)
    ranks.send(0, "make")
    assert ranks.hear(0) == "made"
    (comm,) = status.comms(child)
    assert [(rank["pid"], rank["finished_calls"]) for rank in comm["ranks"]] == [(child, 1)]
    pids = {comm["ranks"][0]["pid"]: comm["ranks"][0] for comm in status.comms(ranks.pid(0))}
    assert pids[ranks.pid(0)]["finished_calls"] == 0
    ranks.send(0, "end")
    ranks.finish(on=(0,))


def look_only_at(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    """As if this user had no other processes: other tests run at the same time."""
    monkeypatch.setattr(looking, "_own_processes", lambda: list(pids))


def test_what_has_ended_or_is_no_rank_is_one_line(
    status: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ranks(1) as pool:
        pid = pool.pid(0)
        pool.run(do_open_alone, meeting_point())
        assert status.comms(pid)[0]["size"] == 1
    assert f"process {pid} has ended, or never was" in status.line(pid)
    look_only_at(monkeypatch, os.getpid(), pid)
    assert "a job that has finished has none" in status.line()
    assert f"process {os.getpid()} has no open communicator" in status.line(os.getpid())
    for words in (["x"], ["-1"], ["0"]):
        with pytest.raises(SystemExit):
            status(*words)


def do_open_alone(seat: Seat, path: str) -> None:
    seat.comm(path, 1)


@pytest.fixture
def foreign() -> Iterator[Callable[[bytes], None]]:
    """foreign(content): a page of this process, which has no communicators."""
    file = os.memfd_create("status-of-hsgd")
    yield lambda content: os.pwrite(file, content, 0)
    os.close(file)


def header(magic: bytes, version: int, record_bytes: int, used: int) -> bytes:
    """Of a page that this process would have written."""
    return struct.pack("=8sIIIIIIII", magic, version, record_bytes, os.getpid(), 9, used, 0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (None, "cut off after 4 bytes"),
        ((b"hsgdstat", 1, 384, 9), "is cut off"),
        ((b"anything", 1, 384, 0), "its status page is not one of hsgd's"),
        ((b"hsgdstat", 0, 384, 0), "has version 0, and this hsgd reads 1"),
        ((b"hsgdstat", 7, 384, 0), "has version 7, and this hsgd reads 1"),
        ((b"hsgdstat", 1, 400, 0), "records of 400 bytes"),
        ((b"hsgdstat", 1, 384, 1 << 31), "2147483648 records"),
    ],
)
def test_a_page_of_others_or_of_another_version_is_refused(
    status: Command,
    foreign: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    fields: tuple[bytes, int, int, int] | None,
    words: str,
) -> None:
    foreign(b"hsgd" if fields is None else header(*fields))
    look_only_at(monkeypatch, os.getpid())
    line = status.line(os.getpid())
    assert words in line and f"process {os.getpid()}: " in line
    assert words in status.line()


@pytest.mark.parametrize("content", [b"", bytes(4096)])
def test_a_page_that_is_being_made_is_none_yet(
    status: Command,
    foreign: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
) -> None:
    foreign(content)
    look_only_at(monkeypatch, os.getpid())
    assert "has no open communicator" in status.line(os.getpid())


def test_one_page_that_is_refused_hides_no_job(
    ranks: Ranks,
    status: Command,
    foreign: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks.run(do_open_alone, meeting_point(), on=(0,))
    look_only_at(monkeypatch, os.getpid(), ranks.pid(0))
    foreign(header(b"hsgdstat", 7, 384, 0))
    code, out, err = status()
    assert code == 1 and str(ranks.pid(0)) in out and "has version 7" in err


def test_the_reader_has_the_layout_of_the_writer() -> None:
    csrc = Path(page.__file__).parents[2] / "csrc"
    record = (csrc / "core/status/status_record.hpp").read_text()
    assert f"kStatusVersion = {page.VERSION};" in record
    kinds = re.search(r"HSGD_KIND_COUNT = (\d+)", (csrc / "include" / "hsgd_core.h").read_text())
    assert kinds is not None and len(page.KINDS) == int(kinds[1]) + 1


# --- other nodes ---


def do_call_over_nodes(seat: Seat, folder: str, late: int) -> None:
    with meet(seat, folder, [0, 0, 1, 1], PATIENT) as comm:
        if seat.rank == late:
            seat.tell("late")
            seat.pipe.recv()
        comm.allreduce(np.ones(100))


def test_ranks_of_several_nodes_are_one_communicator(
    ranks: Ranks, status: Command, tmp_path: Path
) -> None:
    ranks.start(do_call_over_nodes, str(tmp_path), 3)
    assert ranks.hear(3) == "late"
    comm = status.until(lambda comm: standings(comm) == ["waits"] * 3 + ["late"], ranks.pid(0))
    assert (comm["nodes"], comm["held_up_by"]) == (2, [3])
    assert [rank["node"] for rank in comm["ranks"]] == [0, 0, 1, 1]
    ranks.send(3, "go")
    ranks.finish()


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_other_nodes_are_asked_over_ssh(ranks: Ranks, status: Command, bin_folder: Path) -> None:
    """A node of the name `dark` does not answer; the others are this one."""
    program(
        bin_folder,
        "ssh",
        'case " $* " in *" dark "*) echo "ssh: no route" >&2; exit 255;; esac\n'
        'for word; do last="$word"; done; exec sh -c "$last"',
    )
    ranks.start(do_call, meeting_point(), 2)
    assert ranks.hear(2) == "late"
    status.until(lambda comm: standings(comm).count("waits") == 3, ranks.pid(0))
    pid = ranks.pid(0)
    code, out, err = status("-H", "there:4", "--json", "--", pid)
    (comm,) = json.loads(out)["communicators"]
    assert (code, err, comm["held_up_by"], len(comm["ranks"])) == (0, "", [2], SIZE)
    code, out, err = status("-H", "there,dark", pid)
    assert code == 1 and "LATE" in out
    assert err == "hsgd: error: dark: ssh: no route\n"
    assert '"" is not a host' in status.line("-H", "a,,b")
    ranks.send(2, "go")
    ranks.finish()


# --- stacks ---


def test_stacks_are_those_of_the_ranks_that_hold_others_up(
    ranks: Ranks, status: Command, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_folder, "py-spy", 'echo "stack by $*"')
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))  # py-spy lies beside it
    ranks.start(do_call, meeting_point(), 2)
    assert ranks.hear(2) == "late"
    status.until(lambda comm: standings(comm).count("waits") == 3, ranks.pid(0))
    table = status.table("--stacks", ranks.pid(0))
    assert table.count("stack by dump --nonblocking --pid ") == 1
    assert f"stacks of rank 2 (pid {ranks.pid(2)})" in table
    program(bin_folder, "py-spy", 'echo "Permission denied (os error 13)" >&2; exit 1')
    assert "py-spy: Permission denied (os error 13); as root" in status.table(
        "--stacks", ranks.pid(0)
    )
    program(bin_folder, "py-spy", 'echo "$*"; echo "no $*" >&2; [ "$2" != --native ]')
    table = status.table("--native-stacks", ranks.pid(0))
    assert re.search(
        "py-spy: no dump --native .*; the frames of Python alone:\n +dump --non", table
    )
    ranks.send(2, "go")
    ranks.finish()


def test_without_py_spy_a_line_says_how_to_get_it(
    status: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "pip install py-spy" in status.line("--stacks")
