"""Ranks of one node meet: many of them, as an ordinary user, beside a stranger.

Each job runs in a network namespace of its own, where abstract names and somaxconn are its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meeting_programs
from meeting_programs import KEY, NAME, STRANGER

__all__: list[str] = []

LIMIT_S = 240


def run(ranks: int, descriptors: int, somaxconn: int, *stranger: str) -> dict[str, Any]:
    """What the ranks were told, and what the stranger saw."""
    arguments = map(str, (ranks, descriptors, somaxconn, *stranger))
    done = subprocess.run(
        [sys.executable, str(Path(meeting_programs.__file__)), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return output


@pytest.mark.parametrize("ranks", [32, 64, 128])
def test_many_ranks_of_an_ordinary_user_set_up_with_1024_descriptors(ranks: int) -> None:
    assert run(ranks, 1024, 0)["ranks"] == ["ok"] * ranks


def test_ranks_meet_where_a_listener_lets_only_few_of_them_wait() -> None:
    assert run(64, 1024, 4)["ranks"] == ["ok"] * 64


def test_another_user_who_took_the_name_is_told_nothing_and_named_at_once() -> None:
    output = run(3, 1024, 0, "take_the_name")
    assert output["stranger"]["bytes"] == output["stranger"]["descriptors"] == 0
    assert output["stranger"]["connections"] >= 2
    for line in output["ranks"]:
        assert line.startswith(f"ValueError: set-up at {NAME}: a process of another user")
        assert f"uid {STRANGER}" in line


def test_another_user_who_floods_every_door_and_guesses_names_harms_nobody() -> None:
    output = run(4, 1024, 0, "flood")
    assert output["ranks"] == ["ok"] * 4
    assert output["stranger"]["connections"] > 0
    assert output["stranger"]["bytes"] == output["stranger"]["descriptors"] == 0


def test_another_user_who_took_the_name_of_a_box_is_named_at_once() -> None:
    output = run(2, 1024, 0, "take_the_key", "box")
    assert output["stranger"]["bytes"] == output["stranger"]["descriptors"] == 0
    for line in output["ranks"]:
        assert line.startswith("ValueError: ParameterBox: a process of another user")
        assert f"uid {STRANGER}" in line and f'"{KEY}"' in line


def test_ranks_wait_while_other_jobs_have_all_descriptors_of_the_user_under_way() -> None:
    output = run(4, 1024, 0, "hoard")
    assert output["ranks"] == ["ok"] * 4
    assert output["stranger"] >= 4
