"""What the tests of hsgd.io share."""

from __future__ import annotations

import pytest

from hsgd.tools import cli


@pytest.fixture
def hsgd_data(capsys):
    """Runs `hsgd data WORDS...`; exit code, output, and errors."""

    def run(*words):
        capsys.readouterr()
        code = cli.main(["data", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
