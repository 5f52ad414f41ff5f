"""A server of the datasets that a module of tests makes once, as its fixture `original`."""

from __future__ import annotations

import shutil

import pytest

from toolkit.range_server import RangeServer

__all__: list[str] = []


@pytest.fixture
def home(original, tmp_path):
    """A copy, which a test may damage."""
    return shutil.copytree(original, tmp_path / "home")


@pytest.fixture
def server(home):
    with RangeServer(home) as server:
        yield server
