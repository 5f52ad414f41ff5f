"""Blocks in a folder: whole, right, within the limit, whoever writes and whoever is killed."""

from __future__ import annotations

import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

import pytest
from hsgd.io.remote import block_files
from hsgd.io.remote.block_files import BlockFiles, DiskOptions

from block_file_programs import BLOCK_BYTES, KEYS, content_of, key_of, open_files
from tiers import short_form
from toolkit.processes import kill_soon

FILE_BYTES = BLOCK_BYTES + 68  # with its header


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "cache")


def write(files, *numbers):
    for number in numbers:
        files.write(key_of(number), memoryview(content_of(number)))


def present(files):
    """Numbers of the blocks that are there, and right."""
    out = bytearray(BLOCK_BYTES)
    found = []
    for number in range(KEYS):
        if files.read(key_of(number), BLOCK_BYTES, 0, memoryview(out)) == "here":
            assert out == content_of(number)
            found.append(number)
    return found


def all_files(folder):
    return [
        path for path in Path(folder).rglob("*") if path.is_file() and path.name != "hsgd-ledger"
    ]


def bytes_in(folder):
    return sum(path.stat().st_size for path in all_files(folder))


def only_block(folder):
    (path,) = all_files(folder)
    return path


@pytest.mark.parametrize(
    ("start", "count"),
    [(0, 1), (0, BLOCK_BYTES), (65_535, 2), (65_536, 65_536), (199_999, 1), (70_000, 100_000)],
)
def test_ranges_of_a_block_are_what_was_written(folder, start, count):
    files, out = open_files(folder, 1 << 20), bytearray(count)
    write(files, 1)
    assert files.read(key_of(1), BLOCK_BYTES, start, memoryview(out)) == "here"
    assert out == content_of(1)[start : start + count]
    assert only_block(folder).stat().st_size == FILE_BYTES


@pytest.mark.parametrize("damage", ["body", "header", "cut", "longer", "empty", "exchanged"])
def test_a_damaged_block_is_never_read(folder, damage):
    files = open_files(folder, 1 << 20)
    write(files, 1)
    path = only_block(folder)
    content = path.read_bytes()
    if damage == "exchanged":
        write(files, 2)
        content = next(p for p in all_files(folder) if p != path).read_bytes()
    at = {"body": 100_000, "header": 20}.get(damage, 0)
    wrong = {
        "cut": content[:-1],
        "longer": content[:48] + b"x" + content[48:],
        "empty": b"",
        "exchanged": content,
    }.get(damage, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    path.write_bytes(wrong)
    out = memoryview(bytearray(BLOCK_BYTES))
    assert files.read(key_of(1), BLOCK_BYTES, 0, out) == "damaged"
    assert not any(out)
    assert files.remove(key_of(1))
    assert files.read(key_of(1), BLOCK_BYTES, 0, out) == "missing"
    write(files, 1)
    assert files.read(key_of(1), BLOCK_BYTES, 0, out) == "here"


def test_what_was_used_least_recently_is_removed_first(folder):
    files = open_files(folder, 5 * FILE_BYTES)
    write(files, 0, 1, 2, 3)
    for number in (0, 2, 3):
        files.read(key_of(number), BLOCK_BYTES, 0, memoryview(bytearray(1)))
    write(files, 4, 5)
    assert present(files) == [2, 3, 4, 5]  # a sixteenth of the limit is freed beyond what is needed


def test_what_this_job_has_used_is_not_removed_for_more_of_it(folder):
    write(open_files(folder, 4 * FILE_BYTES), 0, 1)
    files = BlockFiles(DiskOptions(folder, 4 * FILE_BYTES))
    files.read(key_of(1), BLOCK_BYTES, 0, memoryview(bytearray(1)))
    write(files, 2, 3, 4, 5, 6)
    assert not files.keeps
    assert present(files) == [1, 2, 3, 4]


def test_the_limit_holds_after_each_block(folder):
    files = open_files(folder, 3 * FILE_BYTES + 1)
    for number in range(KEYS):
        write(files, number)
        assert bytes_in(folder) <= 3 * FILE_BYTES + 1
    assert KEYS - 1 in present(files)


def test_a_block_beyond_the_limit_is_not_kept(folder):
    files = open_files(folder, FILE_BYTES - 1)
    write(files, 1)
    assert not all_files(folder)


def test_a_block_that_gets_its_name_while_blocks_are_counted_counts(folder, monkeypatch):
    """Another process renames when this one has listed the folder, into one that was not there."""
    files, other = open_files(folder, 2 * FILE_BYTES), open_files(folder, 1 << 30)
    write(files, 0)
    with other._reserved(FILE_BYTES) as (_, temporary):

        def listed(path, listdir=os.listdir):
            names = listdir(path)
            if os.path.exists(temporary):
                other._rename(temporary, f"{folder}/ab/{'0' * 62}")
            return names

        os.truncate(f"{folder}/hsgd-ledger", 0)  # so that they are counted
        monkeypatch.setattr(os, "listdir", listed)
        write(files, 1)
        assert bytes_in(folder) <= 2 * FILE_BYTES


def test_a_ledger_that_is_lost_is_counted_anew(folder):
    write(open_files(folder, 3 * FILE_BYTES), 0, 1, 2)
    (Path(folder) / "hsgd-ledger").write_bytes(b"")
    write(open_files(folder, 3 * FILE_BYTES), 3)
    assert bytes_in(folder) <= 3 * FILE_BYTES


def test_files_with_other_names_stay(folder):
    os.makedirs(f"{folder}/ab")
    others = [Path(folder, name) for name in ("notes.txt", "tmp-notes", "ab/notes.txt")]
    for path in others:
        path.write_text("mine")
    files = open_files(folder, FILE_BYTES)
    write(files, *range(5))
    assert all(path.read_text() == "mine" for path in others)


def test_the_folder_is_its_owners(folder):
    open_files(folder, FILE_BYTES)
    assert os.stat(folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "user", "text"),
    [
        (0o777, 0, "written by all users .mode 777.*with mode 700"),
        (0o755, 1, "belongs to another user"),
    ],
)
def test_a_folder_that_others_may_write_is_refused(folder, monkeypatch, mode, user, text):
    os.mkdir(folder)
    os.chmod(folder, mode)
    here = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: here + user)
    with pytest.raises(ValueError, match=text):
        open_files(folder, FILE_BYTES)


def test_what_is_no_folder_is_refused(folder):
    Path(folder).write_text("a file")
    with pytest.raises(ValueError, match=r"cannot be used.*name a folder"):
        open_files(folder, FILE_BYTES)


def test_a_disk_that_is_full_ends_it_with_one_warning(folder):
    files = open_files(folder, 1 << 20)
    write(files, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.warns(UserWarning, match="keeps nothing more in this process.*the data comes"):
            write(files, 1)
        write(files, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert present(files) == [0]
    assert len(all_files(folder)) == 1


def test_a_write_that_fails_half_way_leaves_nothing(folder, monkeypatch):
    files = open_files(folder, 1 << 20)
    calls = []

    def full(descriptor, part, write=os.write):
        calls.append(len(part))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(descriptor, part)

    monkeypatch.setattr(block_files.os, "write", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        write(files, 1)
    assert not all_files(folder)
    assert not files.keeps


def test_a_ledger_that_another_holds_keeps_nobody_waiting(folder, monkeypatch):
    monkeypatch.setattr(block_files, "_LOCK_S", 0.01)
    monkeypatch.setattr(block_files, "_FULL_S", 0.0)
    files, other = open_files(folder, 1 << 20), open_files(folder, 1 << 20)
    with other._locked() as held:
        assert held is not None
        write(files, 1)
    assert present(files) == []
    write(files, 1)
    assert present(files) == [1]


def test_a_ledger_that_another_holds_is_asked_for_once_in_a_while(folder, monkeypatch):
    monkeypatch.setattr(block_files, "_LOCK_S", 0.01)
    files, other = open_files(folder, 1 << 20), open_files(folder, 1 << 20)
    with other._locked():
        write(files, 1)
    assert not files.keeps


@pytest.mark.parametrize("kind", ["file", "symlink", "second name"])
def test_a_ledger_that_is_no_ledger_stays_as_it_is(folder, tmp_path, kind):
    os.mkdir(folder, 0o700)
    thesis, ledger = tmp_path / "thesis.txt", Path(folder) / "hsgd-ledger"
    thesis.write_text("hsgdldg1 of great worth" if kind == "second name" else "of great worth")
    if kind == "file":
        thesis = thesis.rename(ledger)
    elif kind == "symlink":
        ledger.symlink_to(thesis)
    else:
        ledger.hardlink_to(thesis)
    before = thesis.read_text()
    with pytest.raises(ValueError, match=r"cannot be used: .*name a folder"):
        open_files(folder, 1 << 20)
    assert thesis.read_text() == before


@pytest.mark.parametrize("kind", ["fifo", "folder", "symlink"])
def test_what_is_no_file_in_the_place_of_a_block_is_not_read(folder, kind):
    files = open_files(folder, 1 << 20)
    write(files, 1)
    (block,) = all_files(folder)
    content = block.rename(block.with_name("elsewhere"))
    if kind == "fifo":
        os.mkfifo(block)
    elif kind == "folder":
        block.mkdir()
    else:
        block.symlink_to(content)
    assert present(files) == []


def test_a_folder_that_cannot_be_used_is_only_warned_of_where_it_is_not_required(tmp_path):
    (tmp_path / "file").write_text("")
    options = DiskOptions(str(tmp_path / "file"), 1 << 20)
    with pytest.warns(UserWarning, match="cannot be used.*the data comes from the server"):
        files = BlockFiles(options, required=False)
    write(files, 1)
    assert not files.keeps and present(files) == []


@pytest.mark.long
def test_threads_and_objects_share_a_folder(folder):
    failed = []

    def work(seed):
        chance, files = random.Random(seed), open_files(folder, 10 * FILE_BYTES)
        try:
            for _ in range(60):
                write(files, chance.randrange(KEYS))
                assert bytes_in_or_moving(folder) <= 10 * FILE_BYTES
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert 0 < len(present(open_files(folder, 10 * FILE_BYTES))) <= 10


def bytes_in_or_moving(folder):
    """As bytes_in(), while files come and go, each counted once."""
    sizes = {}
    for path in all_files(folder):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.long
@pytest.mark.parametrize("attempt", short_form("chaos", range(20), keep=10))
def test_processes_that_are_killed_leave_whole_blocks(folder, attempt):
    seed = time.time_ns() + attempt
    print(f"seed {seed}")
    chance, limit = random.Random(seed), 12 * FILE_BYTES
    path = str(Path(__file__).with_name("block_file_programs.py"))
    for _ in range(3):
        command = [sys.executable, path, folder, str(limit)]
        both = [[*command, str(seed + n)] for n in range(2)]
        assert kill_soon(both, "begun", chance, 0.2) == ["", ""]
        assert bytes_in(folder) <= limit
        files = open_files(folder, limit)
        assert not list(Path(folder).glob("tmp-*"))
        assert len(present(files)) == len(all_files(folder)) > 0
