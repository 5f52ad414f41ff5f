"""A server of the datasets that a module of tests makes once, as its fixture `original`."""

from __future__ import annotations

import shutil

import pytest

from toolkit.range_server import RangeServer

__all__: list[str] = []


@pytest.fixture
def credentials(monkeypatch):
    """The variables of an S3 that is none of Amazon's, but for where it is."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "never-shown",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def home(original, tmp_path):
    """A copy, which a test may damage."""
    return shutil.copytree(original, tmp_path / "home")


@pytest.fixture
def server(home):
    with RangeServer(home) as server:
        yield server
