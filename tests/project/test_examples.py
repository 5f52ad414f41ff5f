"""The commands in the docstrings of the examples work, in their shortest form; what is optional is
missed before training, in one line; logs have whole lines.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers import short_form
from toolkit.processes import launch_environ, run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOB_S = 300.0
# Open MPI's shared memory leaves a file in /dev/shm where no mpirun is: one rank needs none.
ALONE = {"OMPI_MCA_btl": "self"}


def commands() -> Iterator[tuple[str, str]]:
    for path in sorted(EXAMPLES.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE):
            if "--host" not in line:  # needs nodes, which tests of their own have
                yield path.stem, line.partition("#")[0].strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where examples/ is, as in the project, and the images of train_digits are made."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "examples").symlink_to(EXAMPLES)
    return folder


def run(folder: Path, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    if command[0] == "python":
        env |= ALONE
    argv = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command]
    return run_marked(argv, launch_environ(**env), JOB_S)


@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize(("name", "command"), short_form("torch", commands(), keep=4), ids=str)
def test_a_command_in_a_docstring_works(folder: Path, name: str, command: str) -> None:
    words = shlex.split(command)
    if words[:2] == ["hsgd", "data"]:
        (folder / words[-1]).parent.mkdir(exist_ok=True)
        words.append("--overwrite")
    else:
        prepare(folder, name)
        words += ["--epochs", "1"]
    done = run(folder, words)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "\r" not in done.stdout + done.stderr  # whole lines only, as no terminal is there


def prepare(folder: Path, name: str) -> None:
    if name == "train_digits" and not (folder / "demo").exists():
        done = run(folder, ["hsgd", "data", "convert", "digits", "demo/digits", "--quiet"])
        assert done.returncode == 0, done.stderr


def test_every_example_names_a_command() -> None:
    assert {name for name, _ in commands()} == {path.stem for path in EXAMPLES.glob("*.py")}


WITHOUT = """
import runpy, sys

sys.modules["matplotlib"] = None
sys.argv = ["train_digits.py", "--api", "hsgd", "--epochs", "100000"]
runpy.run_path("examples/train_digits.py", run_name="__main__")
"""


def test_a_missing_plotting_package_is_told_before_training(folder: Path) -> None:
    prepare(folder, "train_digits")
    done = run(folder, ["python", "-c", WITHOUT])
    assert done.returncode == 1
    assert done.stderr == "train_digits: the plot needs matplotlib; pip install matplotlib\n"


OBJECTS = """
import sys

sys.modules["cloudpickle"] = None
import torch
import hsgd.torch as hvd
from hsgd import MissingExtra

hvd.init()
model = torch.nn.Linear(2, 2)
hvd.broadcast_optimizer_state(torch.optim.Adam(model.parameters()), root_rank=0)
print(hvd.broadcast_object({"a": [1, "b"]}), hvd.allgather_object((2, None)))
try:
    hvd.broadcast_object(lambda: 1)
except MissingExtra as error:
    print(error)
"""


def test_objects_travel_without_cloudpickle_where_pickle_can_send_them(folder: Path) -> None:
    done = run(folder, ["python", "-c", OBJECTS])
    assert done.returncode == 0, done.stderr
    values, refusal = done.stdout.splitlines()
    assert values == "{'a': [1, 'b']} [(2, None)]"
    assert refusal.startswith("function cannot be sent by pickle (")
    assert refusal.endswith("which is not installed; pip install cloudpickle")


@pytest.mark.parametrize(
    "code", ["from hsgd import Comm; Comm.local('@x', 0, 1)", "import hsgd.torch"]
)
def test_sources_without_their_library_say_where_they_were_imported_from(
    tmp_path: Path, code: str
) -> None:
    """As in a clone after `pip install .`; -S hides this environment's own way to the library."""
    clone = tmp_path / "clone"
    for path in (EXAMPLES.parent / "hsgd").rglob("*.py"):
        target = clone / path.relative_to(EXAMPLES.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (clone / "setup.py").touch()
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    done = run(clone, ["python", "-S", "-c", code], PYTHONPATH=packages)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: hsgd was imported from {clone / 'hsgd'}, which has")
    assert "change to another folder" in last and last.endswith("pip install -e .")
