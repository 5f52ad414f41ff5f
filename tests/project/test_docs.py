"""Every block of code in README.md and docs/ works as it stands.

A page is like a notebook: its Python blocks run in order in one namespace, on two ranks under
mpirun, all pages in one job. A comment before a block may say `run on one rank: REASON`, or `not
run: REASON`. Commands are not run (they measure for minutes, or install), but their programs have
the options that the page gives them. Run under mpirun, this file is the program of the ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "sh", "text"}
MARK = re.compile(r"<!-- (run on one rank|not run): (.+) -->")
RANKS = 2
JOB_S = 300.0


@dataclass(frozen=True)
class Block:
    """A fenced block: where its first line is, and what the comment before it says."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        lines = page.read_text().split("\n")
        fences = [number for number, line in enumerate(lines) if line.startswith("```")]
        assert len(fences) % 2 == 0, f"{page.name}: a block has no end"
        for begin, end in zip(fences[::2], fences[1::2], strict=True):
            language = lines[begin][3:].strip()
            mark = MARK.fullmatch(lines[begin - 1])
            text = "\n".join(lines[begin + 1 : end]) + "\n"
            if not languages or language in languages:
                yield Block(page, begin + 2, language, text, mark[1] if mark else "")


def test_every_block_says_what_it_is() -> None:
    assert {
        str(block): block.language for block in blocks() if block.language not in LANGUAGES
    } == {}


def test_ranks_of_a_plain_mpirun_fit_two_cores() -> None:
    """Open MPI refuses more ranks than cores: "not enough slots". `hsgd run` names its slots."""
    sources = [*PAGES, *(ROOT / "examples").rglob("*.py"), ROOT / "hsgd/tools/cli/commands.py"]
    more = [
        (path.name, line.strip())
        for path in sources
        for line in path.read_text().splitlines()
        if (found := re.search(r"\bmpirun -np? ([0-9]+)", line)) and int(found[1]) > 2
        if not re.search(r"--host |-H |OVERSUBSCRIBE|horovod", line)
    ]
    assert more == []


# --- messages ---


def messages() -> list[str]:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


@pytest.fixture(scope="module")
def sources() -> str:
    """All sources of the product; strings that go on in the next line are joined."""
    paths = [path for folder in ("hsgd", "io") for path in (ROOT / folder).rglob("*")]
    code = [path.read_text() for path in paths if path.suffix in {".py", ".cpp", ".hpp", ".h"}]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(code))


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_is_one_of_hsgd(message: str, sources: str) -> None:
    parts = [part.strip(" ,:;") for part in message.split("...")]
    assert [part for part in parts if len(part) > 2 and part not in sources] == []


def test_messages_of_every_part_are_explained() -> None:
    assert len(messages()) > 50


# --- Python ---


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    from hdf5_samples import make_photo_slabs, make_ragged_slabs
    from toolkit.processes import launch_environ, run_marked

    folder = tmp_path_factory.mktemp("pages")
    convert = [sys.executable, "-m", "hsgd", "data", "convert", "digits", "data"]
    subprocess.run(convert, cwd=folder, check=True, capture_output=True, timeout=JOB_S)
    make_ragged_slabs(folder / "data" / "text", 200, 4)
    make_photo_slabs(folder / "data" / "photos", 100, 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = launch_environ(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HSGD_TIMEOUT_S="120",
        HSGD_ABORT_AFTER_S="5",
    )
    ranks = ["mpirun", "-n", str(RANKS), sys.executable, __file__]
    return run_marked(["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *ranks], environ, JOB_S)


@pytest.mark.parametrize("block", [*blocks("python")], ids=str)
def test_a_block_of_python_runs(block: Block, done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.count(f"\n{block} ran\n") == RANKS, done.stderr[-3000:]


def test_examples_that_train_do_train(done: subprocess.CompletedProcess[str]) -> None:
    """The loss falls, and does not rise beyond its start once training is under way."""
    found = re.findall(r"^losses of (\S+): (\S+) (\S+) (\S+)$", done.stdout, re.MULTILINE)
    assert {page for page, *_ in found} == {"diloco.md", "large_batches.md", "slow_networks.md"}
    for page, first, most, last in found:
        assert float(most) <= float(first) and float(last) < 0.05 * float(first), page


def test_the_ranks_that_ran_the_blocks_end_well(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    """One rank: as a launcher for torch sets them, RANK and WORLD_SIZE are there."""
    import torch.distributed as dist
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    namespaces: dict[Path, dict[str, Any]] = {}
    for block in blocks("python"):
        if block.page not in namespaces and dist.is_initialized():
            dist.destroy_process_group()  # of the page before
        names = namespaces.setdefault(block.page, {"__name__": block.page.stem})
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        if not block.mark or (block.mark == "run on one rank" and rank == 0):
            exec(code, names)
        MPI.COMM_WORLD.Barrier()
        sys.stdout.write(f"\n{block} ran\n")
        if losses := names.pop("losses", None):
            later = max(losses[len(losses) // 4 :])
            sys.stdout.write(f"losses of {block.page.name}: {losses[0]} {later} {losses[-1]}\n")
        sys.stdout.flush()


# --- commands ---


def commands() -> Iterator[tuple[str, list[str]]]:
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield str(block), shlex.split(line, comments=True)


Check = Callable[[list[str]], None]


def check_python(words: list[str]) -> None:
    """The program is there, and its help has the options."""
    if words[0] == "-m":
        taken = 3 if words[1] == "hsgd" else 2  # its commands have options of their own
        program, options = words[:taken], words[taken:]
    else:
        assert (ROOT / words[0]).is_file(), f"{words[0]} is not there"
        program, options = [words[0]], words[1:]
    check_options([sys.executable, *program], options)


def check_options(program: list[str], options: list[str]) -> None:
    command = [*program, "--help"]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=JOB_S)
    assert report.returncode == 0, report.stderr
    for option in options:
        if option.startswith("--"):
            assert re.search(rf"{option.split('=')[0]}\b", report.stdout), (
                f"{program} has no {option}"
            )


def check_make(words: list[str]) -> None:
    for target in words:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def check_hsgd(words: list[str]) -> None:
    """Options before the command of the ranks, which has its own."""
    own = words[: words.index("--")] if "--" in words else words
    check_python(["-m", "hsgd", *own])


def check_horovodrun(words: list[str]) -> None:
    check_options([str(Path(sys.executable).with_name("horovodrun"))], words)


CHECKS: dict[str, Check] = {
    "python": check_python,
    "make": check_make,
    "hsgd": check_hsgd,
    "horovodrun": check_horovodrun,
}
NOT_CHECKED = {
    "docker": "tests/foreign/test_containers.py makes such containers",
    "pip": "downloads; .ci/run installs the same way",
    "srun": "tests/slurm runs it on a real Slurm",
}


def merged() -> dict[tuple[str, str], list[str]]:
    """Per program and file all options that any page gives it: one --help serves all."""
    found: dict[tuple[str, str], list[str]] = {}
    for _, words in commands():
        if not words:
            continue
        if words[0] == "chrt":
            words = words[3:]
        program, first = Path(words[0]).name, next(iter(words[1:]), "")
        take = 3 if first == "-m" else 2
        options = found.setdefault((program, " ".join(words[1:take])), [])
        options += [word for word in words[take:] if word not in options]
    return found


@pytest.mark.parametrize(
    ("program", "what"),
    [
        pytest.param(*each, marks=[pytest.mark.long] if each[0] == "horovodrun" else [])
        for each in merged()
    ],
    ids=str,
)
def test_a_command_has_the_options_that_the_pages_give_it(program: str, what: str) -> None:
    if program not in NOT_CHECKED:
        CHECKS[program]([*what.split(), *merged()[program, what]])


if __name__ == "__main__":
    main()
