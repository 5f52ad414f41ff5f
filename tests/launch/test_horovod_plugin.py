"""HOROVOD_PLUGIN=hsgd: scripts that import horovod.torch get hsgd.torch, with Horovod installed.

Everything is tried from outside, as commands with a hard limit.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd.jobs.launch import preload
from hsgd.torch.settings import ignored
from site_copy import BIN, SiteCopy, installed_environ
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("horovod")]
JOB_S = 180.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
TOLD = "hsgd: horovod.torch is hsgd.torch; horovodrun --plugin hsgd-mpi (HOROVOD_PLUGIN=hsgd-mpi)"
SCRIPT = """
import horovod
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import allreduce
import hsgd.torch
import horovod.common.elastic

assert hvd is hsgd.torch and TorchState is hvd.elastic.TorchState
assert HorovodInternalError is hvd.HorovodInternalError and ProcessSet is hvd.ProcessSet
assert horovod.common.elastic.HorovodInternalError is HorovodInternalError
assert not hasattr(hvd, "no_name_of_horovods")
hvd.init()
hvd.shutdown()
hvd.init()
total = allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
try:
    hvd.allreduce(torch.ones(3, device="meta"))
except ValueError as error:
    assert str(error).endswith("over MPI calls of hsgd")
print(f"|{horovod.run.__module__} {hvd.rank()} {hvd.size()} {total.tolist()}|", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("launcher", ["horovodrun --plugin hsgd", "mpirun"])
def test_a_script_gets_hsgd_torch_and_one_rank_tells(script: str, launcher: str) -> None:
    program, *options = launcher.split()
    environ = installed_environ(HSGD_REPORT="1", HOROVOD_CYCLE_TIME="3", **AS_ROOT)
    environ |= {} if options else {"HOROVOD_PLUGIN": "hsgd"}
    words = [str(BIN / program), *options, "-np", "2", sys.executable, script]
    done = run_marked(words, environ, JOB_S)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(re.findall(r"\|(.*?)\|", done.stdout))
    assert lines == [f"horovod.runner {rank} 2 [3.0, 3.0, 3.0]" for rank in range(2)]
    assert done.stderr.count(TOLD) == 1
    assert done.stderr.count("hsgd: HOROVOD_CYCLE_TIME: ignored") == 1
    for rank in range(2):
        found = re.findall(rf"hsgd: rank {rank}: hsgd.torch: (\d+) calls", done.stderr)
        assert len(found) == 2 and int(found[1]) > 0


@pytest.mark.parametrize(
    "need",
    [
        "from horovod.torch.mpi_ops import _basics",
        "from horovod.torch import mpi_lib_v2",
        "import horovod.torch as hvd; hvd.mpi_ops.HorovodAllreduce",
        "import horovod.torch as hvd; hvd.check_extension('horovod.torch', '', '')",
    ],
)
def test_a_need_of_horovods_own_is_one_line_that_names_the_other_plugin(need: str) -> None:
    environ = installed_environ(HOROVOD_PLUGIN="hsgd")
    done = run_marked([sys.executable, "-c", need], environ, JOB_S)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: HOROVOD_PLUGIN=hsgd: horovod.torch")
    assert "--plugin hsgd-mpi" in line
    with_theirs = installed_environ(HOROVOD_PLUGIN="hsgd-mpi")
    done = run_marked([sys.executable, "-c", need], with_theirs, JOB_S)
    assert "hsgd: error" not in done.stderr and "AttributeError" not in done.stderr


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("0", "0")])
def test_open_mpi_yields_under_horovods_threads_unless_told_otherwise(
    given: str | None, used: str, tmp_path: Path
) -> None:
    name = "OMPI_MCA_mpi_yield_when_idle"
    (tmp_path / "train.py").write_text(
        "import ctypes\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "mpi = ctypes.CDLL(None)\n"
        "level, at, count, value = (ctypes.c_int() for _ in range(4))\n"
        "handle = ctypes.c_void_p()\n"
        "mpi.PMPI_T_init_thread(0, ctypes.byref(level))\n"
        "mpi.PMPI_T_cvar_get_index(b'mpi_yield_when_idle', ctypes.byref(at))\n"
        "mpi.PMPI_T_cvar_handle_alloc(at, None, ctypes.byref(handle), ctypes.byref(count))\n"
        "mpi.PMPI_T_cvar_read(handle, ctypes.byref(value))\n"
        "print('yields', value.value, flush=True)\n"
    )
    environ = installed_environ(HOROVOD_PLUGIN="hsgd-mpi", **AS_ROOT)
    environ = {key: value for key, value in environ.items() if key != name}
    environ |= {} if given is None else {name: given}
    words = [str(BIN / "mpirun"), "-np", "1", sys.executable, str(tmp_path / "train.py")]
    done = run_marked(words, environ, JOB_S)
    assert done.stdout.split() == ["yields", used], done.stderr


def test_a_module_of_horovods_own_is_not_there() -> None:
    environ = installed_environ(HOROVOD_PLUGIN="hsgd")
    done = run_marked([sys.executable, "-c", "import horovod.torch.mpi_lib_v2"], environ, JOB_S)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ModuleNotFoundError: No module named")
    assert "--plugin hsgd-mpi" in last


def test_a_backend_that_is_not_mpi_is_refused() -> None:
    environ = installed_environ(HOROVOD_PLUGIN="hsgd", HOROVOD_CONTROLLER="gloo")
    done = run_marked([sys.executable, "-c", "import horovod.torch"], environ, JOB_S)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: ") and "HOROVOD_CONTROLLER=gloo" in line


@pytest.fixture
def with_tensorflow(tmp_path: Path) -> dict[str, str]:
    """An environment whose Horovod was built for TensorFlow, too: a stand-in without a function."""
    installed = preload.horovod_libraries()[0].parents[1]
    package = tmp_path / "horovod"
    package.mkdir()
    for each in installed.iterdir():
        if each.name != "tensorflow":
            (package / each.name).symlink_to(each)
    (package / "tensorflow").mkdir()
    (package / "tensorflow" / "__init__.py").write_text("from horovod.tensorflow import mpi_ops\n")
    (package / "tensorflow" / "mpi_ops.py").write_text(
        "from horovod.common.process_sets import _setup\n"
    )
    shutil.copy(preload.horovod_libraries()[0], package / "tensorflow" / "mpi_lib.so")
    return installed_environ(HOROVOD_PLUGIN="hsgd", PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize(
    "imports",
    [
        ("horovod.torch", "horovod.tensorflow"),
        ("horovod.tensorflow", "horovod.torch"),
        ("horovod.common.process_sets", "horovod.tensorflow"),
    ],
)
def test_two_frameworks_in_one_program_are_refused(
    with_tensorflow: dict[str, str], imports: tuple[str, str]
) -> None:
    code = f"import {imports[0]}; print('first', flush=True); import {imports[1]}"
    done = run_marked([sys.executable, "-c", code], with_tensorflow, JOB_S)
    assert (done.returncode, done.stdout) == (1, "first\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: HOROVOD_PLUGIN=hsgd, ")
    assert "imports both horovod.torch" in line and "--plugin hsgd-mpi" in line


def test_another_framework_gets_the_interposer(with_tensorflow: dict[str, str]) -> None:
    code = (
        "import horovod.tensorflow; from hsgd.jobs.launch import preload; "
        "print(preload.is_active())"
    )
    done = run_marked([sys.executable, "-c", code], with_tensorflow, JOB_S)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_launcher_still_sees_horovods_own_modules() -> None:
    environ = installed_environ(HOROVOD_PLUGIN="hsgd")
    done = run_marked([str(BIN / "horovodrun"), "--check-build"], environ, JOB_S)
    assert "[X] PyTorch" in done.stdout and "[X] Gloo" in done.stdout


def test_a_function_of_horovod_run_gets_hsgd_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import horovod\n"
        "def job():\n"
        "    import horovod.torch as hvd\n"
        "    hvd.init()\n"
        "    return hvd.__name__, hvd.size()\n"
        "if __name__ == '__main__':\n"
        "    print(horovod.run(job, num_proc=2))\n"
    )
    environ = installed_environ(HOROVOD_PLUGIN="hsgd", **AS_ROOT)
    done = run_marked([sys.executable, str(tmp_path / "program.py")], environ, JOB_S)
    assert "[('hsgd.torch', 2), ('hsgd.torch', 2)]" in done.stdout, done.stderr


def test_ranks_with_unequal_plugins_end_and_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.environ['HOROVOD_PLUGIN'] = 'hsgd-mpi'\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
    )
    environ = installed_environ(HOROVOD_PLUGIN="hsgd", HSGD_TIMEOUT_S="20", **AS_ROOT)
    environ["HSGD_ABORT_AFTER_S"] = "1"
    words = [str(BIN / "mpirun"), "-np", "2", sys.executable, str(tmp_path / "train.py")]
    done = run_marked(words, environ, JOB_S)
    assert done.returncode != 0
    assert "HOROVOD_PLUGIN must be the same on all ranks" in done.stderr


def test_settings_that_hsgd_torch_does_not_read_are_named() -> None:
    found = ignored(
        {"HOROVOD_TIMELINE": "t", "HOROVOD_FUSION_THRESHOLD": "1", "HOROVOD_RANK": "0", "HOME": "/"}
    )
    assert found == ("HOROVOD_FUSION_THRESHOLD",)


@pytest.mark.parametrize("damaged", ["hsgd/_native.*.so", "hsgd/libhsgd_core.so", "hsgd/config.py"])
def test_a_worker_without_a_working_hsgd_stops_with_one_line(tmp_path: Path, damaged: str) -> None:
    copy = SiteCopy.make(tmp_path / "site")
    (file,) = copy.root.glob(damaged)
    file.write_text("damaged")
    done = copy.python("import horovod.torch; print('trains')", HOROVOD_PLUGIN="hsgd")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hsgd: error: ")


def test_two_nodes_need_nothing_but_a_host_list(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "import torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.ones(100_000), op=hvd.Sum)\n"
        "print(hvd.__name__, hvd.rank(), os.uname().nodename, total[0].item(), flush=True)\n"
    )
    argv = [sys.executable, str(tmp_path / "train.py")]
    done = cluster(2).horovodrun(3, argv, hosts="node1:2,node2:1", plugin="hsgd")
    assert done.returncode == 0, done.stderr
    for rank, node in enumerate(("node1", "node1", "node2")):
        assert f"hsgd.torch {rank} {node} 3.0" in done.stdout
    assert done.stderr.count(TOLD) == 1
