"""oneCCL as a candidate: where it is measured, and of what its library is made.

Nothing is fetched here: a stand-in for pip and the compiler writes what they would.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from harness import candidates, installing, jobs, layouts, operations, peers

__all__: list[str] = []

ONECCL = next(c for c in candidates.CANDIDATES if c.name == "oneccl")
JOB = next(j for j in candidates.JOBS if j.name == ONECCL.job)
WHEELS = {
    "oneccl_cpu-1": ("lib/libccl.so", "lib/libccl.so.1", "lib/libccl.so.1.0"),
    "oneccl-1": ("lib/libccl.so.1", "lib/libccl.so.2", "lib/libccl.so.2.0"),
    "oneccl_devel-1": ("include/oneapi/header", "include/oneapi/ccl/another", "lib/libccl.a"),
}


class FakeTools:
    """Notes what is called; for pip it writes the wheels, for the compiler the library."""

    def __init__(self) -> None:
        self.called: list[list[str]] = []

    def run(self, what: str, words: list[str], environment: object = None) -> None:
        self.called.append(words)
        if "download" in words:
            folder = Path(words[words.index("-d") + 1])
            for wheel, names in WHEELS.items():
                with zipfile.ZipFile(folder / f"{wheel}-none.whl", "w") as archive:
                    for name in names:
                        archive.writestr(f"{wheel}.data/data/{name}", wheel)
        elif "-o" in words:
            Path(words[words.index("-o") + 1]).touch()


def test_oneccl_does_every_collective_on_one_node() -> None:
    assert set(ONECCL.collectives) == set(operations.OPERATIONS)
    assert ONECCL.fits_layout(layouts.on_one_node(2)) and ONECCL.fits_layout(layouts.on_one_node(4))
    assert not ONECCL.fits_layout(layouts.read_layout("2x2"))
    assert JOB.peer == "oneccl" and JOB.crowded


def test_its_library_is_linked_once_of_what_three_wheels_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSGD_CACHE", str(tmp_path))
    tools = FakeTools()
    monkeypatch.setattr(installing, "run", tools.run)
    library = peers.oneccl_library(install=True)
    files = {p.relative_to(library.parent): p for p in library.parent.rglob("*") if p.is_file()}
    texts = {str(name): path.read_text() for name, path in files.items()}
    assert texts == {
        "lib/libccl.so.1": "oneccl_cpu-1",  # the wheel for GPUs has another of that name
        "lib/libccl.so.2": "oneccl-1",
        "include/oneapi/header": "oneccl_devel-1",
        "include/oneapi/ccl/another": "oneccl_devel-1",
        library.name: "",
    }
    made = len(tools.called)
    assert peers.oneccl_library(install=False) == library and len(tools.called) == made


def test_its_ranks_start_as_those_of_intel_mpi_and_are_told_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "oneccl_library", lambda install: tmp_path / "libpeer.so")
    monkeypatch.setattr(jobs, "intel_mpi_environment", lambda install: tmp_path)
    monkeypatch.setattr(jobs, "mpich_environment", lambda install: tmp_path)
    monkeypatch.setattr(jobs, "compile_native", lambda folder, compiler, hsgd: folder / "worker")
    tools = jobs.prepare(JOB, tmp_path, install=False)
    assert tools.word == str(tmp_path / "libpeer.so")
    assert tools.launcher.path == str(tmp_path / "bin" / "mpiexec.hydra")
    assert tools.environment["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "lib")
    assert not tools.tells_hosts
