"""Every launcher with every front end, two ranks on this node."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from elastic_jobs import HSGD, JOB_S
from toolkit.front_ends import FRONT_ENDS, check_answers, write_program
from toolkit.processes import launch_environ, run_marked

__all__: list[str] = []

PYTHON = sys.executable
LAUNCHERS = {
    "mpirun": ["mpirun", "-np", "2", PYTHON],
    "hsgd run, mpirun": [*HSGD, "run", "-np", "2", "--launcher", "mpirun", PYTHON],
    "hsgd run, torchrun": [*HSGD, "run", "-np", "2", "--launcher", "torchrun", PYTHON],
    "hsgd run, elastic": [*HSGD, "run", "-np", "2", "--min-np", "2", PYTHON],
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}
# A rank of an elastic job learns its number in hvd.init(), so the others are tried after it.
ELASTIC = ("hvd",)


@pytest.mark.parametrize(
    "launcher",
    [
        name if name == "mpirun" else pytest.param(name, marks=pytest.mark.long)
        for name in LAUNCHERS
    ],
)
def test_every_front_end_joins_all_ranks(launcher: str, tmp_path: Path) -> None:
    if launcher == "mpirun":
        assert shutil.which("mpirun", path=launch_environ()["PATH"])
    front_ends = ELASTIC if launcher.endswith("elastic") else FRONT_ENDS
    words = [*LAUNCHERS[launcher], *write_program(tmp_path, front_ends)]
    done = run_marked(words, launch_environ(HSGD_AS_GLOO="1"), JOB_S)
    assert done.returncode == 0, done.stderr[-3000:]
    check_answers(done.stdout, front_ends, 2)
