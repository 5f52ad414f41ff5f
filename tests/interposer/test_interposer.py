"""The interposer takes large collectives and changes nothing else that a program can see.

The programs are C (mpi_programs/) and mpi4py; run under mpirun, this file is the latter:
`python test_interposer.py CASE`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsgd.base import elf
from hsgd.jobs.launch import launch, mpi_compiler, preload
from hsgd.metrics import CollectiveCounters, interposer_collectives, interposer_counters
from mpi_programs import (
    EXPECTED_CALLS,
    EXPECTED_TAKEN,
    LIMIT_S,
    NAMES,
    OPEN_MPI_PROGRAMS,
    PROGRAMS,
    assert_almost_all_taken,
    calls,
    compile_programs,
    taken_and_passed,
)
from toolkit.cluster import Cluster
from toolkit.processes import run_marked

__all__: list[str] = []

EXECUTE = "import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n"
MOVED_BYTES = 64 << 20

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the C programs and a Python file that becomes the program it is told."""
    mpicc = mpi_compiler.find_wrapper("mpicc")
    assert mpicc is not None
    names = PROGRAMS if is_mpich() else PROGRAMS + OPEN_MPI_PROGRAMS
    folder = compile_programs(mpicc, tmp_path_factory.mktemp("programs"), names)
    (folder / "execute.py").write_text(EXECUTE)
    return folder


@pytest.fixture
def run(mpirun: Run, programs: Path) -> Run:
    """run(np, *words, env={}): ranks of a C program, or of a case of this file, interposed."""

    def start(
        np: int, program: str, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        compiled = program in PROGRAMS + OPEN_MPI_PROGRAMS
        name = [str(programs / program)] if compiled else [program]
        script = programs / "execute.py" if compiled else Path(__file__)
        everything = {"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60", **(env or {})}
        return mpirun(np, script, *name, *words, env=everything, timeout_s=LIMIT_S)

    return start


@pytest.mark.parametrize("np", [2, 3, 4])
def test_results_equal_mpi_for_integers_and_the_promised_order_for_floats(
    run: Run, np: int
) -> None:
    assert calls(run(np, "results", "1024")) == (EXPECTED_TAKEN, EXPECTED_CALLS - EXPECTED_TAKEN)


@pytest.mark.long
def test_everything_but_empty_calls_is_taken_when_asked_for(run: Run) -> None:
    done = run(3, "results", "0", env={"HSGD_MIN_BYTES": "0"})
    assert calls(done) == (EXPECTED_CALLS - 4 * 11, 4 * 11)


@pytest.mark.long
def test_small_chunks_and_rings_give_the_same_results(run: Run) -> None:
    env = {"HSGD_CHUNK_BYTES": "4096", "HSGD_SLOTS": "3", "HSGD_ONESHOT_BYTES": "0"}
    assert calls(run(2, "results", "1024", env=env))[0] == EXPECTED_TAKEN


def test_one_rank_stays_with_mpi(run: Run) -> None:
    assert calls(run(1, "results", "1024")) == (0, EXPECTED_CALLS)


@pytest.mark.parametrize("np", [2, 4])
def test_what_is_not_ours_passes_through(run: Run, np: int) -> None:
    mistakes = [] if is_mpich() else ["mistakes"]  # its wheel checks no arguments, and crashes
    assert calls(run(np, "passing", *mistakes)) == (0, 28 + 20 * len(mistakes))


@pytest.mark.long
@pytest.mark.parametrize("np", [2, 3])
def test_communicators_come_and_go_without_a_trace(run: Run, np: int) -> None:
    # On all of them, short as their lives are; rank 0 is alone in one.
    assert calls(run(np, "lives", env={"HSGD_MIN_BYTES": "0"})) == (266, 21)


def test_two_threads_reduce_on_two_communicators(run: Run) -> None:
    assert calls(run(2, "threads", env={"HSGD_MIN_BYTES": "0"})) == (2 * (60 + 6), 0)


# --- the other collectives ---


@pytest.mark.long
@pytest.mark.parametrize("np", [2, 3, 4])
def test_every_collective_equals_mpi_when_ranks_use_datatypes_of_their_own(
    run: Run, np: int
) -> None:
    env = {"HSGD_MIN_BYTES": "0"}
    assert_almost_all_taken(run(np, "collectives", "300", str(np), "1", "mixed", env=env))


@pytest.mark.long
def test_every_collective_equals_mpi_where_some_calls_pass_through(run: Run) -> None:
    found = taken_and_passed(run(3, "collectives", "300", "7", "1", "alike"))
    assert found.keys() == NAMES
    del found["MPI_Barrier"]  # has no size: taken where something else was before
    assert all(taken > 1 and passed > 1 for taken, passed in found.values()), found


@pytest.mark.long
def test_two_threads_make_any_collective_on_their_own_communicators(run: Run) -> None:
    env = {"HSGD_MIN_BYTES": "0"}
    assert_almost_all_taken(run(2, "collectives", "200", "5", "2", "mixed", env=env))


def test_one_rank_makes_its_collectives_with_mpi(run: Run) -> None:
    found = taken_and_passed(run(1, "collectives", "100", "3", "1", "mixed"))
    assert all(taken == 0 and passed > 0 for taken, passed in found.values()), found


@pytest.mark.parametrize("layout", ["node1:2,node2:2", "node1:2,node2:1"])
def test_every_collective_equals_mpi_between_nodes(
    cluster: Callable[..., Cluster], programs: Path, layout: str
) -> None:
    done = cluster(2).mpirun(
        sum(int(host[-1]) for host in layout.split(",")),
        [str(programs / "collectives"), "200", "11", "1", "mixed"],
        hosts=layout,
        env={
            "LD_PRELOAD": str(preload.library()),
            "HSGD_TIMEOUT_S": "60",
            "HSGD_MIN_BYTES": "0",
        },
        timeout_s=LIMIT_S,
    )
    assert_almost_all_taken(done)


def test_a_communicator_is_set_up_when_it_has_proved_to_be_used(run: Run) -> None:
    paying = 571  # a broadcast of 16000 bytes is worth 7 us, and the set-up 2 ms for each rank
    short_lived = 50 * (2 * 2 + 1)
    assert calls(run(2, "patience")) == ((700 - paying) * 2, short_lived + paying * 2)


@pytest.mark.parametrize("np", [2, 3])
def test_sizes_at_which_mpi_is_as_fast_pass_through(run: Run, np: int) -> None:
    found = taken_and_passed(run(np, "sizes"))
    assert found.pop("MPI_Barrier") == (0, 0)
    assert found == {
        "MPI_Allreduce": (4 + 2, 1 + 3),  # user-defined ops too
        "MPI_Bcast": (2, 3),
        "MPI_Allgather": (1, 4),
        "MPI_Allgatherv": (1, 4),
        "MPI_Reduce_scatter": (4, 1),
        "MPI_Reduce_scatter_block": (4, 1),
    }


def test_a_rank_that_waits_carries_on_with_messages_that_others_need(run: Run) -> None:
    """Also where the receiver cannot fetch the data from the sender's memory by itself."""
    assert calls(run(2, "progress", env={"OMPI_MCA_smsc": "^cma"})) == (2, 0)


@pytest.mark.parametrize("np", [2, 3])
def test_a_rank_that_waits_serves_the_windows_of_others(run: Run, np: int) -> None:
    assert calls(run(np, "passive")) == (5, 0)


def test_a_rank_that_waits_sleeps_only_while_it_has_no_messages(run: Run) -> None:
    """Each of a large message's many steps needs a look of the sender where ranks cannot read one
    another's memory, as in many containers. Ranks that share a core sleep all the same."""
    assert calls(run(2, "awake", str(launch.cores()), env={"OMPI_MCA_smsc": "^cma"})) == (3, 1)


@pytest.mark.skipif("is_mpich()", reason="MPICH's Fortran functions call the C ones")
@pytest.mark.parametrize("np", [2, 3])
def test_fortran_programs_take_the_same_path_under_every_name(run: Run, np: int) -> None:
    assert calls(run(np, "fortran", env={"HSGD_MIN_BYTES": "0"})) == (5 * 9, 0)


@pytest.mark.skipif("is_mpich()", reason="its wheel has no MPIX_Comm_is_revoked")
@pytest.mark.parametrize("interposed", [False, True], ids=["plain", "interposed"])
def test_fault_tolerant_programs_see_the_same_error_classes(
    programs: Path, tmp_path: Path, interposed: bool
) -> None:
    """Revoking ends a wait at once; a death is MPIX_ERR_PROC_FAILED; what is left goes on."""
    mpirun = Path(sys.executable).with_name("mpirun")
    argv = [str(mpirun if mpirun.exists() else "mpirun"), "--with-ft", "ulfm", "-n", "3"]
    argv += ["--oversubscribe", "--mca", "btl_sm_backing_directory", str(tmp_path)]
    argv += ["--mca", "mpi_yield_when_idle", "1", str(programs / "ulfm")]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if interposed:
        env |= {"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60"}
    done = run_marked(argv, env, LIMIT_S)
    output = done.stdout.split()
    assert output.count("fine") == 2 and output.count("died") >= 1, done.stdout + done.stderr
    assert "not true" not in done.stderr
    assert ("hsgd: error: allreduce" in done.stderr) == interposed


@pytest.mark.long
def test_a_rank_that_lives_is_no_failed_process(
    cluster: Callable[..., Cluster], programs: Path
) -> None:
    done = cluster(2).mpirun(
        4,
        [str(programs / "gave_up")],
        env={"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "2"},
        options=("--with-ft", "ulfm"),
        timeout_s=LIMIT_S,
    )
    assert done.stdout == "fine\n" * 3, done.stdout + done.stderr
    assert done.stderr.count("another node gave up: allreduce #2") == 2, done.stderr


def test_programs_in_python_can_read_what_was_taken_and_what_passed(run: Run) -> None:
    done = run(2, "counted")
    assert (done.returncode, done.stdout) == (0, "fine\nfine\n"), done.stdout + done.stderr
    assert interposer_collectives() is None  # not in this process


# --- the program around it ---


def test_a_program_without_mpi_does_not_notice() -> None:
    env = {**os.environ, "LD_PRELOAD": str(preload.library()), "HSGD_MIN_BYTES": "nonsense"}
    for argv in (["true"], ["sh", "-c", "echo hello"], [sys.executable, "-S", "-c", "pass"]):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_program_without_mpi_loads_neither_mpi_nor_the_cpp_runtime() -> None:
    """Shells and compilers of a job start as fast as without the interposer, and a program that
    brings a C++ runtime of its own, such as conda's Python, finds no other one loaded before."""
    env = {**os.environ, "LD_PRELOAD": str(preload.library())}
    done = subprocess.run(
        ["cat", "/proc/self/maps"], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {Path(line.split()[5]).name for line in done.stdout.splitlines() if "/" in line}
    assert preload.library().name in loaded
    heavy = ("libmpi", "libstdc++", "libgcc", "libhsgd_core", "libhsgd_mpi", "libhsgd_pmpi")
    assert not {name for name in loaded if name.startswith(heavy)}


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The library that programs preload, without its engine beside it."""
    return Path(shutil.copy(preload.library(), tmp_path))


def assert_flat_with_a_line_of_each_rank(done: subprocess.CompletedProcess[str], np: int) -> None:
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == np, done.stderr
    for line in lines:
        assert "hsgd: warning: the interposer does not load: " in line
        assert f"{preload.engine().name} is missing, which the MPI of this program" in line


@pytest.mark.long
@pytest.mark.parametrize("program", ["results", "progress", "threads"])
def test_a_program_goes_on_with_plain_mpi_where_the_engine_does_not_load(
    run: Run, alone: Path, program: str
) -> None:
    words = ["1024"] if program == "results" else []
    done = run(2, program, *words, env={"LD_PRELOAD": str(alone), "OMPI_MCA_smsc": "^cma"})
    assert calls(done) == (0, 0)  # nobody counts
    assert_flat_with_a_line_of_each_rank(done, 2)


@pytest.mark.long
def test_a_program_with_an_older_cpp_runtime_goes_on_with_plain_mpi(
    run: Run, tmp_path: Path
) -> None:
    """Such as conda's or a vendor's, which was there before."""
    source, script, runtime = (tmp_path / n for n in ("empty.c", "versions", "libstdc++.so.6"))
    source.write_text("int of_an_older_runtime;\n")
    script.write_text("GLIBCXX_3.4 { global: of_an_older_runtime; };\nCXXABI_1.3 { };\n")
    words = ["cc", "-shared", "-fPIC", str(source), "-o", str(runtime)]
    words += ["-Wl,-soname,libstdc++.so.6", f"-Wl,--version-script,{script}"]
    subprocess.run(words, check=True, timeout=LIMIT_S)
    done = run(2, "results", "1024", env={"LD_PRELOAD": f"{preload.library()} {runtime}"})
    assert calls(done) == (0, 0)
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == 2, done.stderr
    assert all("does not load" in line and "libstdc++.so.6: version" in line for line in lines)


def test_plain_mpi_is_found_where_it_came_with_a_module_of_python(run: Run, alone: Path) -> None:
    """mpi4py loads libmpi for itself: it is not in the scope in which all libraries look."""
    done = run(2, "messages_and_sums", env={"LD_PRELOAD": str(alone)})
    assert (done.returncode, done.stdout) == (0, "fine\nfine\n"), done.stderr
    assert_flat_with_a_line_of_each_rank(done, 2)


def test_messages_alone_do_not_load_the_engine(run: Run) -> None:
    done = run(2, "messages_only")
    assert (done.returncode, done.stdout) == (0, "fine\nfine\n"), done.stdout + done.stderr


def test_a_report_tells_for_each_rank_what_was_taken_and_what_passed(run: Run) -> None:
    done = run(2, "threads", env={"HSGD_REPORT": "1", "HSGD_MIN_BYTES": "0"})
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("hsgd: "))
    assert len(lines) == 2, done.stderr
    for rank, line in enumerate(lines):
        assert re.match(
            rf"hsgd: rank {rank}: MPI_Allreduce: 132 calls with \S+ MB took the two-level path, "
            r"0 with \S+ MB passed through to MPI; \S+ MB moved inside the node, ",
            line,
        )


def test_a_report_also_tells_that_nothing_was_taken(run: Run) -> None:
    done = run(1, "results", "1024", env={"HSGD_REPORT": "1"})
    assert f"0 calls with 0.000 MB took the two-level path, {EXPECTED_CALLS} with " in done.stderr


@pytest.mark.parametrize("setting", ["HSGD_MIN_BYTES=lots", "HSGD_SLOTS=1", "HSGD_STORE=fast"])
def test_a_malformed_setting_ends_the_job_with_one_line(run: Run, setting: str) -> None:
    name, value = setting.split("=")
    done = run(2, "passing", env={name: value})
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == 1, done.stderr
    assert f"hsgd: error: {setting}: expected " in lines[0]


def test_ranks_with_different_settings_stay_with_mpi_and_say_so(run: Run) -> None:
    done = run(2, "different_settings")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == 1, done.stderr
    assert "hsgd: warning: set-up: ranks 0 and 1 have different HSGD_* settings" in lines[0]
    assert done.stdout == "3.0 taken 0\n"


@pytest.mark.long
def test_a_rank_that_never_comes_is_an_error_and_not_a_hang(run: Run) -> None:
    done = run(2, "missing_rank", env={"HSGD_TIMEOUT_S": "2"})
    assert done.returncode != 0
    assert "set-up over MPI: not all of 2 ranks began it within 2 s" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("late", [(2,), (0,), (0, 1)], ids=str)
def test_ranks_that_come_late_are_waited_for_with_a_warning(
    run: Run, late: tuple[int, ...]
) -> None:
    """MPI knows no deadline, so hsgd has one only where the user sets it."""
    done = run(3, "late", *map(str, late), env={"HSGD_TIMEOUT_S": ""})
    assert calls(done) == (2, 0)
    output = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert any(
        "warning: set-up over MPI: not all of 3 ranks began it" in line for line in output
    ), output
    names = ", ".join(rf"rank {rank} \([^)]*\)" for rank in late)
    late_by = "not finished within the timeout of 0.5 s"
    text = rf"warning: allreduce #2: {late_by}: {names} did not .*still waiting \(set"
    assert any(re.search(text, line) for line in output), output


@pytest.mark.long
def test_a_late_rank_is_named_on_its_node_where_ranks_alternate_between_nodes(
    cluster: Callable[..., Cluster], programs: Path
) -> None:
    done = cluster(2).mpirun(
        4,
        [str(programs / "late"), "0"],
        env={"LD_PRELOAD": str(preload.library())},
        options=("--map-by", "node"),
        timeout_s=LIMIT_S,
    )
    assert calls(done) == (2, 0)
    assert re.search(r"warning: allreduce #2: .*: rank 0 \(pid \d+, node1\) did not", done.stderr)
    assert re.search(r"warning: allreduce #2: .*: still waiting for another node", done.stderr)


@pytest.mark.parametrize("late", [0, 3])
def test_a_rank_late_to_finalize_leaves_no_message_unread(
    cluster: Callable[..., Cluster], programs: Path, late: int
) -> None:
    done = cluster(2).mpirun(
        4,
        [str(programs / "finalize"), str(late)],
        env={"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60"},
        options=("--map-by", "slot"),  # two leaders in each node, and two communicators
        timeout_s=LIMIT_S,
    )
    assert calls(done) == (2, 0)
    assert re.search(r"^told 8 heard 8$", done.stderr, re.MULTILINE), done.stderr


def test_a_deadline_of_the_user_holds_for_a_rank_that_comes_late(run: Run) -> None:
    done = run(2, "late", "1", env={"HSGD_TIMEOUT_S": "1"})
    assert done.returncode != 0
    assert "error: set-up over MPI: not all of 2 ranks began it within 1 s" in done.stderr


@pytest.mark.long
def test_communicators_for_which_descriptors_are_missing_stay_with_mpi(run: Run) -> None:
    done = run(2, "few_descriptors", env={"HSGD_MIN_BYTES": "0"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "hsgd: " in line]
    assert len(lines) == 3, done.stderr
    assert all("file descriptors are needed and " in line for line in lines), done.stderr
    assert done.stdout == "taken 60\n"


@pytest.mark.parametrize("np", [2, 3])
def test_mistakes_of_the_program_are_mpi_errors_with_our_words(run: Run, np: int) -> None:
    done = run(np, "mistakes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "fine\n" * np


@pytest.mark.parametrize("layout", ["node1:2,node2:2", "node1:2,node2:1"])
def test_nodes_exchange_the_least_that_an_allreduce_can(
    cluster: Callable[..., Cluster], layout: str
) -> None:
    np = sum(int(host[-1]) for host in layout.split(","))
    done = cluster(2).mpirun(
        np,
        [sys.executable, __file__, "between_nodes"],
        hosts=layout,
        env={"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60"},
        timeout_s=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert set(report) == {
        f"{name} {what}" for name in ("node1", "node2") for what in ("sent", "wire")
    }
    for name, value in report.items():  # 2 (N - 1) / N of the payload, N = 2
        assert int(value) == pytest.approx(MOVED_BYTES, rel=0.05 if "wire" in name else 0.01), name


def test_one_rank_on_each_node_stays_with_mpi(cluster: Callable[..., Cluster]) -> None:
    done = cluster(2).mpirun(
        2,
        [sys.executable, __file__, "alone_on_nodes"],
        env={"LD_PRELOAD": str(preload.library()), "HSGD_REPORT": "1"},
        timeout_s=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "3.0 taken 0\n"), done.stderr
    assert done.stderr.count("took the two-level path, 1 with 0.012 MB passed through") == 2


@pytest.mark.long
def test_what_simulation_shows_behind_on_many_nodes_stays_with_mpi(
    cluster: Callable[..., Cluster],
) -> None:
    done = cluster(9).mpirun(
        10,
        [sys.executable, __file__, "many_nodes"],
        hosts=",".join(f"node{k}:{2 if k == 1 else 1}" for k in range(1, 10)),
        env={"LD_PRELOAD": str(preload.library()), "HSGD_TIMEOUT_S": "60"},
        timeout_s=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "reduce_scatter 0 allreduce 1\n"), done.stderr


def is_mpich() -> bool:
    found = mpi_compiler.find_mpi()
    return found is not None and found.name == "MPICH"


# --- the programs of the ranks ---


def reduced(world: Any, count: int = 3000) -> float:
    """One MPI_Allreduce of rank + 1; the first element of the sum."""
    sums = np.empty(count, np.float32)
    world.Allreduce(np.full(count, world.rank + 1, np.float32), sums)
    assert (sums == sums[0]).all()
    return float(sums[0])


def taken() -> int:
    counters = interposer_counters()
    assert counters is not None
    return counters.calls


def counted(world: Any) -> None:
    from mpi4py import MPI

    for count in (10, 1000):
        reduced(world, count)
        world.Bcast(np.zeros(count, np.uint8))
        world.Bcast(np.zeros(2 * count, np.uint8))
    world.Allreduce(MPI.IN_PLACE, np.zeros(1000, np.int64), MPI.BAND)
    found = interposer_collectives()
    assert found is not None
    assert found["MPI_Allreduce"] == CollectiveCounters(1, 4000, 2, 40)
    assert found["MPI_Bcast"] == CollectiveCounters(1, 2000, 3, 1030)
    assert found["MPI_Allgatherv"] == CollectiveCounters(0, 0, 0, 0)
    print("fine\n", end="", flush=True)  # in one piece, also unbuffered


def different_settings(world: Any) -> None:
    if world.rank == 1:
        os.environ["HSGD_SLOTS"] = "5"
    total = reduced(world)
    if world.rank == 0:
        print(total, "taken", taken())


def messages_and_sums(world: Any) -> None:
    got = world.sendrecv(world.rank, dest=1 - world.rank, source=1 - world.rank)
    assert got == 1 - world.rank
    assert reduced(world) == 3.0
    world.Barrier()
    assert interposer_collectives() == {} and taken() == 0
    print("fine\n", end="", flush=True)  # in one piece, also unbuffered


def messages_only(world: Any) -> None:
    request = world.Isend(np.full(5, world.rank), 1 - world.rank)
    got = np.empty(5, int)
    world.Recv(got, 1 - world.rank)
    request.Wait()
    assert (got == 1 - world.rank).all() and taken() == 0
    engine = str(preload.engine())
    assert engine not in elf.loaded_libraries()
    reduced(world)
    assert engine in elf.loaded_libraries() and taken() == 1
    print("fine\n", end="", flush=True)  # in one piece, also unbuffered


def missing_rank(world: Any) -> None:
    """Rank 1 does not think that its call is large."""
    if world.rank == 1:
        os.environ["HSGD_MIN_BYTES"] = "1000000000"
    try:
        reduced(world)
    finally:
        world.Abort(3)


def few_descriptors(world: Any) -> None:
    """60 communicators alive at once take no more descriptors than one; where not even the
    meeting of two ranks has enough, three more are left to MPI.
    """
    used = len(os.listdir("/proc/self/fd"))
    communicators = []
    for free, more in ((60, 60), (25, 3)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, used + free))
        communicators += [world.Dup() for _ in range(more)]
        for communicator in communicators[-more:]:
            assert reduced(communicator) == 3.0
    if world.rank == 0:
        print("taken", taken())


def alone_on_nodes(world: Any) -> None:
    total = reduced(world)
    if world.rank == 0:
        print(total, "taken", taken())


def many_nodes(world: Any) -> None:
    many = np.ones((1 << 19) // world.size * world.size, np.float32)
    few = np.empty(many.size // world.size, np.float32)
    counts = []
    world.Allreduce(np.ones(1 << 10, np.float32), np.empty(1 << 10, np.float32))
    before = taken()
    for _ in range(3):
        world.Reduce_scatter_block(many, few)
        assert (few == world.size).all()
    counts.append(taken() - before)
    world.Allreduce(many, np.empty_like(many))
    counts.append(taken() - before)
    if world.rank == 0:
        print("reduce_scatter", counts[0], "allreduce", counts[1])


def mistakes(world: Any) -> None:
    """Each is an MPI error on every rank, and the communicator goes on."""
    from mpi4py import MPI

    def refused(send: Any, receive: Any, *texts: str) -> None:
        with pytest.raises(MPI.Exception) as error:
            world.Allreduce(send, receive)
        assert error.value.Get_error_class() == MPI.ERR_OTHER
        assert all(text in str(error.value) for text in ("hsgd: ", *texts)), error.value

    expected = world.size * (world.size + 1) / 2
    for _ in range(3):
        assert reduced(world) == expected
        count = 2000 + world.rank
        refused(np.ones(count, np.float32), np.empty(count, np.float32), "rank 0", "rank 1", "2001")
        dtype = np.float64 if world.rank == 1 else np.int64
        refused(np.ones(2000, dtype), np.empty(2000, dtype), "float64", "int64")
        both = np.ones(6000, np.float32)
        refused(both[:4000], both[2000:], "overlap")
    assert reduced(world) == expected
    print("fine\n", end="", flush=True)  # in one piece, also unbuffered


def between_nodes(world: Any) -> None:
    """Verify a result bit by bit, then move MOVED_BYTES and tell what each node has sent."""
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    verify_order(world, node)
    buffer = np.ones((MOVED_BYTES // 4) // 4, np.float32)
    world.Allreduce(MPI.IN_PLACE, buffer)
    world.Barrier()
    before, wire_before = interposer_counters(), sent_by_interface()
    for _ in range(4):
        world.Allreduce(MPI.IN_PLACE, buffer)
    world.Barrier()
    after, wire_after = interposer_counters(), sent_by_interface()
    assert before is not None and after is not None
    assert buffer[0] == buffer[-1] == float(world.size) ** 5
    sent = node.reduce((after - before).inter_bytes_sent)
    if node.rank == 0:
        name = os.uname().nodename
        print(f"{name} sent {sent}\n{name} wire {wire_after - wire_before}\n", end="", flush=True)


def verify_order(world: Any, node: Any) -> None:
    """The sum of each node in rank order, then of the nodes; one rank calls in place."""
    from mpi4py import MPI

    count = 300_007
    mine = np.random.default_rng(world.rank).standard_normal(count, np.float32)
    nodes: dict[str, Any] = {}
    for name, row in world.allgather((os.uname().nodename, mine)):
        nodes[name] = nodes[name] + row if name in nodes else row
    first, *others = nodes.values()
    result = mine.copy() if world.rank == 1 else np.empty_like(mine)
    world.Allreduce(MPI.IN_PLACE if world.rank == 1 else mine, result)
    assert result.tobytes() == sum(others, start=first).tobytes()


def sent_by_interface() -> int:
    """Bytes that this node has sent to others, as the kernel counts."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (numbers,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(numbers[8])


if __name__ == "__main__":
    from mpi4py import MPI

    globals()[sys.argv[1]](MPI.COMM_WORLD)
