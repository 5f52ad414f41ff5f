"""The hsgd command from outside: words, exit codes, one-line errors."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hsgd.base import mpi_abi
from hsgd.jobs.launch import preload
from site_copy import SiteCopy, fake_launcher, installed_environ


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> SiteCopy:
    copy = SiteCopy.make(tmp_path_factory.mktemp("site"))
    copy.compile_interposer()
    return copy


@pytest.fixture
def damaged(tmp_path: Path) -> SiteCopy:
    """A copy without interposer, for one test to damage further."""
    return SiteCopy.make(tmp_path / "site")


def test_help_teaches_with_examples(site: SiteCopy) -> None:
    done = site.hsgd("--help")
    assert done.returncode == 0
    assert "horovodrun --plugin hsgd -np 4 python train.py" in done.stdout
    assert "hsgd run -np 4 -H node1:2,node2:2 python train.py" in site.hsgd("run", "--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        ["fly"],
        ["run"],
        ["run", "-np", "2"],
        ["run", "-np", "0", "x"],
        ["run", "-np", "2.5", "x"],
    ],
)
def test_wrong_usage_exits_with_2(site: SiteCopy, words: list[str]) -> None:
    done = site.hsgd(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (
            "Open MPI 5.0.11",
            "-np 900 -H localhost:900 --bind-to none --map-by slot "
            "--mca mpi_yield_when_idle 1 -x HOROVOD_PLUGIN -x HSGD_SLOTS -x PATH -x PYTHONPATH "
            "{master} -x LD_PRELOAD={interposer} {torch} python train.py --lr 1",
        ),
        (
            "MPICH 5.0.2",
            "-np 900 -hosts localhost:900 -bind-to none -genvall "
            "{master} -genv LD_PRELOAD {interposer} {torch} python train.py --lr 1",
        ),
        (
            "Intel MPI 2021.19.0",
            "-genvall -genv I_MPI_PIN off {master} -genv LD_PRELOAD {interposer} "
            "-host localhost -n 900 {torch} python train.py --lr 1",
        ),
    ],
)
def test_a_dry_run_prints_the_command_for_each_launcher(
    damaged: SiteCopy, tmp_path: Path, description: str, expected: str
) -> None:
    name, _, version = description.rpartition(" ")
    abi = mpi_abi.OPEN_MPI if name == "Open MPI" else mpi_abi.MPICH
    damaged.says_built_for(abi, version)
    damaged.compile_interposer()
    path = fake_launcher(tmp_path / "fake", description)
    words = ["run", "-np", "900", "--dry-run", "python", "train.py", "--lr", "1"]
    done = damaged.hsgd(*words, PATH=path, HSGD_SLOTS="4", HOME=str(tmp_path), LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout)
    assert "HOROVOD_PLUGIN=hsgd-mpi" in printed
    started = " ".join(printed[printed.index(f"{path}/mpirun") + 1 :])
    started = started.replace("-x LD_LIBRARY_PATH ", "")
    mpi = "OMPI_COMM_WORLD_{}" if name == "Open MPI" else "PMI_{}"
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if name == "Open MPI":
        local = (mpi.format("LOCAL_RANK"), mpi.format("LOCAL_SIZE"))
    theirs = [mpi.format("RANK"), mpi.format("SIZE"), *local]
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    words = " ".join(f'{one}="${other}"' for one, other in zip(ours, theirs, strict=True))
    port = started.partition("MASTER_PORT")[2][1:].partition(" ")[0]
    master = "-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=@"
    if name != "Open MPI":
        master = "-genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT @"
    assert port.isdecimal() and started == expected.format(
        interposer=damaged.interposer,
        master=master.replace("@", port),
        torch=f'sh -c export {words}; exec "$@" sh',
    )


def test_a_resource_manager_places_the_ranks_when_no_hosts_are_named(
    damaged: SiteCopy, tmp_path: Path
) -> None:
    damaged.compile_interposer()
    path = fake_launcher(tmp_path / "fake", "Open MPI 5.0.11")
    done = damaged.hsgd("run", "-np", "2", "--dry-run", "x", PATH=path, SLURM_JOB_ID="12")
    assert done.returncode == 0, done.stderr
    assert " -H " not in done.stdout


def test_a_launcher_of_another_mpi_is_not_used(damaged: SiteCopy, tmp_path: Path) -> None:
    damaged.says_built_for(mpi_abi.MPICH, "4.2.0")
    damaged.compile_interposer()
    path = fake_launcher(tmp_path / "fake", "Open MPI 4.1.6")
    code = (
        "import sys; sys.executable = '/nowhere/python'\n"
        "from hsgd.jobs.launch import launch; launch.find_launcher({'PATH': sys.argv[1]})"
    )
    done = damaged.python(code, path)
    assert "mpirun is Open MPI 4.1.6" in done.stderr
    assert "hsgd was built for MPICH and Intel MPI" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "-np", "2", "-H", "node1:x", "true"], '"node1:x" is not name:slots'),
        (["run", "-np", "9", "-H", "node1:2,node2:2", "true"], "4 slots for 9 ranks"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    damaged: SiteCopy, tmp_path: Path, words: list[str], text: str
) -> None:
    damaged.compile_interposer()
    path = fake_launcher(tmp_path / "fake", "Open MPI 5.0.11")
    done = damaged.hsgd(*words, PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("hsgd: error: ")
    assert text in done.stderr
    loud = damaged.hsgd(*words, PATH=path, HSGD_DEBUG="1")
    assert "Traceback" in loud.stderr


def test_a_malformed_variable_is_told_before_anything_starts(
    site: SiteCopy, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    done = site.hsgd("run", "-np", "2", "touch", str(started), HSGD_SLOTS="many")
    assert done.returncode == 1
    assert done.stderr.startswith("hsgd: error: HSGD_SLOTS=many: expected ")
    assert not started.exists()


def test_preload_prints_the_path_of_an_interposer_that_loads(site: SiteCopy) -> None:
    done = site.hsgd("preload")
    assert (done.returncode, done.stdout) == (0, f"{site.interposer}\n")


def test_preload_prints_nothing_when_calls_would_stay_with_mpi(damaged: SiteCopy) -> None:
    missing = damaged.hsgd("preload")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "is missing" in missing.stderr
    damaged.compile_interposer_of_a_strange_mpi()
    assert damaged.hsgd("preload").returncode == 0
    (damaged.root / "hsgd" / "libmpi.so.99").unlink()
    broken = damaged.hsgd("preload")
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "libmpi.so.99" in broken.stderr
    assert len(broken.stderr.splitlines()) == 1


def test_run_gives_the_ranks_the_interposer(tmp_path: Path) -> None:
    copy = SiteCopy.make(tmp_path / "site")
    copy.compile_counting_interposer()
    file = tmp_path / "sum.py"
    file.write_text(
        "import os\n"
        "from array import array\n"
        "from mpi4py import MPI\n"
        "total = array('d', [0.0])\n"
        "MPI.COMM_WORLD.Allreduce(array('d', [1.0]), total)\n"
        "print(total[0], os.environ['HOROVOD_PLUGIN'], flush=True)\n"
    )
    done = copy.hsgd("run", "-np", "2", sys.executable, str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0 hsgd-mpi\n") == 2
    assert done.stderr.count("stand-in saw calls") == 2


def test_run_ends_with_the_exit_code_of_the_job(site: SiteCopy) -> None:
    assert site.hsgd("run", "-np", "2", "sh", "-c", "exit 7").returncode == 7


@pytest.mark.long
def test_info_names_the_remedy_of_what_stops_use(damaged: SiteCopy) -> None:
    done = damaged.hsgd("info")
    assert done.returncode == 1
    assert "What is wrong:" in done.stdout
    assert f"{damaged.interposer.name} is missing" in done.stdout
    assert "HSGD_ONESHOT_BYTES" in done.stdout


@pytest.mark.long
def test_info_reports_the_layout_of_a_job_once(tmp_path: Path) -> None:
    copy = SiteCopy.make(tmp_path / "site")
    copy.compile_counting_interposer()
    done = copy.hsgd("run", "-np", "3", sys.executable, copy.command, "info")
    assert done.stdout.count("vector kernels") == 1, done.stderr
    assert "3 on 1 node(s)" in done.stdout
    assert "ranks 0, 1, 2" in done.stdout


def test_clean_removes_only_sockets_without_a_listener(site: SiteCopy) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        stale, alive, other = (Path(folder, name) for name in ("hsgd-a", "hsgd-b", "other"))
        listener = socket.socket(socket.AF_UNIX)
        for path in (stale, other):
            with socket.socket(socket.AF_UNIX) as gone:
                gone.bind(str(path))
        with listener:
            listener.bind(str(alive))
            listener.listen()
            Path(folder, "hsgd-file").touch()
            seen = site.hsgd("clean", "--dry-run", TMPDIR=folder)
            assert seen.stdout == f"stale: {stale}\n"
            done = site.hsgd("clean", TMPDIR=folder)
            again = site.hsgd("clean", TMPDIR=folder)
        assert (done.returncode, done.stdout) == (0, f"removed: {stale}\n")
        assert sorted(os.listdir(folder)) == ["hsgd-b", "hsgd-file", "other"]
        assert again.stdout == "nothing is left of killed jobs\n"


def installed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hsgd", *words],
        env=installed_environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_installed_hsgd_tells_its_version() -> None:
    assert installed("--version").stdout.startswith("hsgd 0.")


@pytest.mark.long
def test_info_finds_nothing_that_stops_use_of_the_installed_hsgd() -> None:
    done = installed("info")
    assert done.returncode == 0, done.stdout
    assert "vector kernels" in done.stdout


@pytest.mark.skipif(not mpi_abi.present(), reason="hsgd was built where no MPI was found")
def test_the_installed_interposer_can_be_preloaded() -> None:
    done = installed("preload")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.rstrip()) == preload.library()


@pytest.mark.parametrize("abi", mpi_abi.present())
def test_an_interposer_is_printed_for_each_mpi(abi: str) -> None:
    done = installed("preload", "--abi", abi)
    assert (done.returncode, Path(done.stdout.rstrip())) == (0, preload.library(abi)), done.stderr
