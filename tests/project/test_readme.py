"""The command blocks of README.md, in a clone and an environment that has only what they install.

Owns the small programs that stand for a user's own. Long: it builds hsgd as a user does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INSTALL_S, COMMAND_S = 1800.0, 180.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(INSTALL_S + 10 * COMMAND_S)]

DDP = r"""
import sys
import torch
import torch.distributed as dist

dist.init_process_group("{backend}")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
sys.stdout.write("size %d\n" % dist.get_world_size())
dist.destroy_process_group()
"""
HOROVOD = r"""
import sys
import torch
import horovod.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
sys.stdout.write("size %d\n" % hvd.size())
"""
MPI = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char** argv) {
  float one = 1, sum = 0;
  MPI_Init(&argc, &argv);
  MPI_Allreduce(&one, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  printf("size %.0f\\n", sum);
  return MPI_Finalize();
}
"""


@dataclass(frozen=True)
class Site:
    """A folder of the user, with scripts, and an environment."""

    folder: Path
    environ: dict[str, str]

    def type(self, command: str, limit_s: float = COMMAND_S, clone: Path | None = None) -> str:
        """What a command prints, which must succeed. clone: to type it there."""
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=clone or self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def block(kind: str, holding: str) -> str:
    (found,) = (
        text for text in re.findall(rf"```{kind}\n(.*?)```", README, re.S) if holding in text
    )
    return str(found)


def row(holding: str) -> str:
    """The command of a row of the table."""
    (line,) = (line for line in README.splitlines() if line.startswith("|") and holding in line)
    (command,) = (text for text in re.findall(r"`([^`]+)`", line) if holding in text)
    return str(command)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("readme")
    clone = folder / "hsgd"
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    kept = ("PIP_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy", "OMPI_ALLOW_")
    environ = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environ |= {
        "HOME": os.environ.get("HOME", str(folder)),
        "PATH": f"{folder / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONNOUSERSITE": "1",
    }
    (folder / "own").mkdir()
    made = Site(folder / "own", environ)
    made.type(block("sh", "hsgd doctor"), INSTALL_S, clone)
    return made


def assert_sizes(site: Site, command: str, size: int = 0) -> None:
    size = size or int(re.findall(r"-np (\d+)", command)[0])
    assert site.type(command).split() == ["size", str(size)] * size


def test_the_shortest_program_runs(site: Site) -> None:
    (site.folder / "program.py").write_text(
        block("python", "comm = hsgd.Comm()") + "print(total[0])"
    )
    command = re.search(r"`(hsgd run [^`]+ python FILE)`", README)
    assert command is not None
    assert site.type(command[1].replace("FILE", "program.py")).split() == ["2.0", "2.0"]


@pytest.mark.parametrize(
    ("holding", "script"),
    [("--gloo", DDP.format(backend="gloo")), ("hsgd run --horovod", HOROVOD)],
)
def test_a_row_of_the_table_runs(site: Site, holding: str, script: str) -> None:
    (site.folder / "train.py").write_text(script)
    assert_sizes(site, row(holding))


@pytest.mark.parametrize("launch", ["torchrun --nproc-per-node 2", "hsgd run -np 2 python"])
def test_the_backend_starts_as_the_table_says(site: Site, launch: str) -> None:
    assert 'init_process_group("hsgd")' in README
    (site.folder / "train.py").write_text(DDP.format(backend="hsgd"))
    assert_sizes(site, f"{launch} train.py", 2)


def test_an_mpi_program_runs_with_the_interposer(site: Site) -> None:
    (site.folder / "empty.c").write_text(MPI)
    site.type("mpicc -o app empty.c")
    assert_sizes(site, row("hsgd preload"))


def test_data_is_converted(site: Site) -> None:
    command = row("hsgd data convert").replace("SRC", "digits").replace("DST", "data")
    site.type("pip install scikit-learn\n" + command)
    assert "label" in site.type("hsgd data info data/train")
