"""What scripts of Horovod do with gradients between backward() and step(), started by `horovodrun
--plugin hsgd`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from gradient_idioms import IDIOMS
from site_copy import BIN, installed_environ
from toolkit.processes import run_marked

__all__: list[str] = []

PROGRAM = Path(__file__).with_name("plugin_gradient_idioms.py")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
JOB_S = 240.0


@pytest.mark.long
@pytest.mark.timeout(JOB_S + 20)
@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("size", [2, 3])
def test_a_script_of_horovod_trains_like_one_process(size: int) -> None:
    words = [str(BIN / "horovodrun"), "--plugin", "hsgd", "-np", str(size), sys.executable]
    done = run_marked([*words, str(PROGRAM)], installed_environ(**AS_ROOT), JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"\|(\w+) (\w+)\|", done.stdout))
    assert found == {idiom.__name__: "right" for idiom in IDIOMS}
