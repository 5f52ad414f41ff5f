"""The commands in the docstrings of examples/gallery work, in their short form."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from toolkit.processes import launch_environ, run_marked

__all__: list[str] = []

pytestmark = pytest.mark.long

GALLERY = Path(__file__).resolve().parents[2] / "examples" / "gallery"
JOB_S = 240.0
PROGRAMS = sorted(GALLERY.glob("*.py"))
COMMANDS = [
    (path.stem, line)
    for path in PROGRAMS
    for line in re.findall(
        r"^    (\S.*)$", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE
    )
]


def run_short(command: str, steps: int, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [*shlex.split(command), "--steps", str(steps), "--output", str(folder)]
    words = [str(GALLERY / Path(word).name) if word.endswith(".py") else word for word in words]
    return run_marked(words, launch_environ(), JOB_S)


@pytest.mark.timeout(JOB_S + 20)
@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=str)
def test_a_program_of_the_gallery_works(tmp_path: Path, name: str, command: str) -> None:
    done = run_short(command, 10, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.strip() and "\r" not in done.stdout
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_interposer_changes_no_result_of_the_stencil(tmp_path: Path) -> None:
    commands = [command for name, command in COMMANDS if name == "stencil"]
    found = []
    for command in commands:
        done = run_short(command, 25, tmp_path)
        found += re.findall(r"mean temperature ([\d.]+)", done.stdout)
    assert len(commands) == len(found) == 2 and len(set(found)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_cpp_program_splits_its_layers_over_ranks(tmp_path: Path, ranks: int) -> None:
    source, program = GALLERY / "tensor_parallel.cpp", tmp_path / "tensor_parallel"
    command = f"c++ -O2 -std=c++17 -Wall -Werror {source} -o {program} $(hsgd info --flags)"
    built = run_marked(["sh", "-c", command], launch_environ(), JOB_S)
    assert built.returncode == 0, built.stderr
    done = run_marked(["hsgd", "run", "-np", str(ranks), str(program)], launch_environ(), JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{ranks} ranks, ")


def test_programs_of_the_gallery_are_short_and_name_a_command() -> None:
    assert PROGRAMS and {name for name, _ in COMMANDS} == {path.stem for path in PROGRAMS}
    assert [path.name for path in PROGRAMS if len(path.read_text().splitlines()) >= 100] == []
