"""What a job keeps in a store that others may read and write."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsgd.jobs.stores.board import Board
from hsgd.jobs.stores.sealed_store import (
    JOB_SECRET,
    ForeignValue,
    SealedStore,
    draw_job_secret,
    sealed,
)

__all__: list[str] = []

SECRET = "5" * 64
KEY = "hsgd/comm/0/0"


def hash_store() -> Any:
    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    return store


@given(st.text(max_size=300), st.text(max_size=40))
def test_values_come_back_and_no_part_of_them_is_readable(text: str, more: str) -> None:
    raw = hash_store()
    store = SealedStore(raw, SECRET)
    store.set("a", text)
    store.append("b", text)
    store.append("b", more)
    assert store.get("a") == text.encode() and store.get("b") == (text + more).encode()
    assert SealedStore(raw, SECRET).check(["a", "b"])
    kept = base64.b64decode(raw.get("a")[1:])
    assert len(text.encode()) < 4 or text.encode() not in kept
    store.set("c", text)
    assert raw.get("c") != raw.get("a")  # nobody sees that two are equal


@given(st.binary(max_size=200))
def test_what_a_stranger_writes_is_refused_whatever_it_is(rubbish: bytes) -> None:
    raw = hash_store()
    raw.set(KEY, rubbish)
    store = SealedStore(raw, SECRET)
    for ask in (
        lambda: store.get(KEY),
        lambda: store.check([KEY]),
        lambda: store.add(KEY, 1),
        lambda: store.compare_set(KEY, "x", "y"),
    ):
        if rubbish:
            with pytest.raises(ForeignValue, match=f"the key '{KEY}' of the job's store holds"):
                ask()
    with pytest.raises(ForeignValue):
        store.get(KEY)


def test_a_value_of_the_job_is_refused_where_it_was_changed_moved_or_joined() -> None:
    raw = hash_store()
    store = SealedStore(raw, SECRET)
    store.set("whole", "value")
    store.append("parts", "value")
    whole, parts = raw.get("whole"), raw.get("parts")
    told = base64.b64decode(whole[1:])
    for at in range(len(told)):
        changed = bytearray(told)
        changed[at] ^= 1
        raw.set("whole", b"=" + base64.b64encode(bytes(changed)))
        with pytest.raises(ForeignValue):
            store.get("whole")
    for key, kept in (
        ("other", whole),
        ("whole", whole + b" " + whole),
        ("whole", b"+" + whole[1:]),
        ("parts", parts + whole),
        ("parts", b"=" + parts.strip()[1:]),
        ("whole", whole[:40]),
    ):
        raw.set(key, kept)
        with pytest.raises(ForeignValue):
            store.get(key)
    raw.set("whole", whole)
    with pytest.raises(ForeignValue, match=JOB_SECRET):
        SealedStore(raw, draw_job_secret()).get("whole")


def test_numbers_and_exchanges_work_as_in_any_store() -> None:
    raw = hash_store()
    store = SealedStore(raw, SECRET)
    assert [store.add("n", 2), store.add("n", 0), store.add("n", 5)] == [2, 2, 7]
    assert store.compare_set("x", "other", "1") == b""
    assert store.compare_set("x", "", "1") == b"1" == store.get("x")
    assert store.compare_set("x", "2", "3") == b"1"
    assert store.compare_set("x", "1", "3") == b"3" == store.get("x")
    assert not store.check(["x", "y"])


def test_a_board_of_a_job_with_a_secret_hears_its_own_ranks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = hash_store()
    assert sealed(raw) is raw
    monkeypatch.setenv(JOB_SECRET, SECRET)
    board = Board(raw, 0, [0], 2.0, prefix="hsgd", caller="Comm")
    assert board.exchange("address", "@name#secret") == ["@name#secret"]
    keys = [key for key in raw.list_keys() if "address" in key]
    assert len(keys) == 2 and not any(b"secret" in raw.get(key) for key in keys)
    other = Board(raw, 1, [0, 1], 2.0, prefix="hsgd", caller="Comm")
    raw.set(f"{other.prefix}/rank/all", json.dumps(["", [1, 2]]))
    with pytest.raises(ForeignValue, match="hsgd/0/rank/all"):
        other.exchange("rank", 1)


def test_a_value_of_one_group_is_refused_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PrefixStore keeps them apart, and hides from what it keeps which group that is."""
    import torch.distributed as dist

    from hsgd.c10d.rendezvous import open_board

    monkeypatch.setenv(JOB_SECRET, SECRET)
    raw = hash_store()
    for name in ("one", "other"):
        open_board(dist.PrefixStore(name, raw), name, 0, [0], 2.0).exchange("address", "@here")
    kept = [key for key in raw.list_keys() if key.startswith("one/")]
    assert len(kept) == 3
    for key in kept:
        raw.set(key.replace("one", "other"), raw.get(key))
        with pytest.raises(ForeignValue):
            SealedStore(dist.PrefixStore("other", raw), SECRET).get(
                key.removeprefix("one/").replace("one", "other")
            )


def test_no_secret_is_ever_a_word_of_a_command() -> None:
    from hsgd.jobs.launch import launch, without_mpi

    environ = {JOB_SECRET: SECRET, "HSGD_SLOTS": "4"}
    for hosts in ("a:2,b:2", "a:4", "localhost:4", "localhost:2,b:2"):
        commands = without_mpi.plan(["x"], 4, hosts, environ, launch.exported(environ))
        assert SECRET not in json.dumps(commands)
