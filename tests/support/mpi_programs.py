"""The C programs of tests/mpi_programs: compiled for an MPI, and what their output says.

Owns the list of them and the reading of what they print. Never starts them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

__all__ = [
    "EXPECTED_CALLS",
    "EXPECTED_TAKEN",
    "LIMIT_S",
    "NAMES",
    "OPEN_MPI_PROGRAMS",
    "PROGRAMS",
    "TESTS",
    "assert_almost_all_taken",
    "calls",
    "compile_programs",
    "taken_and_passed",
    "taken_by_rank",
]

TESTS = Path(__file__).resolve().parents[1]
LIMIT_S = 100.0
PROGRAMS = (
    "awake",
    "collectives",
    "finalize",
    "large_types",
    "late",
    "lives",
    "passing",
    "passive",
    "patience",
    "progress",
    "results",
    "sizes",
    "threads",
)
OPEN_MPI_PROGRAMS = ("fortran", "gave_up", "ulfm")
NAMES = {
    *("MPI_Allreduce", "MPI_Bcast", "MPI_Barrier", "MPI_Allgather", "MPI_Allgatherv"),
    *("MPI_Reduce_scatter", "MPI_Reduce_scatter_block"),
}
# Of 27 counts of results.c these many have 1 KiB or more: 13 of bytes (4 datatypes), 20 of 4-byte
# elements (3), 23 of 8-byte elements (4); each with 4 ops.
EXPECTED_TAKEN = 4 * (4 * 13 + 3 * 20 + 4 * 23)
EXPECTED_CALLS = 4 * 11 * 27


def compile_programs(mpicc: str, folder: Path, programs: tuple[str, ...] = PROGRAMS) -> Path:
    for name in programs:
        source = str(TESTS / "mpi_programs" / f"{name}.c")
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-rdynamic"]
        subprocess.run([mpicc, *flags, "-o", str(folder / name), source], check=True, timeout=120)
    return folder


def calls(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """How many calls were taken and how many passed, as rank 0 of a C program says."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"taken (\d+) passed (\d+)", done.stdout.strip())
    assert found, done.stdout
    return int(found[1]), int(found[2])


def taken_and_passed(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[int, int]]:
    """Of each collective, how many calls were taken and how many passed, as rank 0 says."""
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"(MPI_\w+): taken (\d+) calls (\d+) bytes, passed (\d+) calls (\d+) bytes"
    found = {}
    for line in done.stdout.splitlines()[:-1]:
        match = re.fullmatch(pattern, line)
        assert match, done.stdout
        name, taken, taken_bytes, passed, passed_bytes = match.groups()
        found[name] = (int(taken), int(passed))
        assert (int(taken_bytes) > 0) == (int(taken) > 0) or name == "MPI_Barrier", line
        assert int(passed_bytes) == 0 or int(passed) > 0, line
    return found


def assert_almost_all_taken(done: subprocess.CompletedProcess[str]) -> None:
    """All but empty calls, and barriers on communicators on which nothing was taken before."""
    found = taken_and_passed(done)
    assert found.keys() == NAMES
    for name, (taken, passed) in found.items():
        assert taken > 5 and passed <= taken, (name, taken, passed)


def taken_by_rank(done: subprocess.CompletedProcess[str]) -> list[int]:
    """Calls on the two-level path of each rank that reported (HSGD_REPORT=1)."""
    reports = [line for line in done.stderr.splitlines() if line.startswith("hsgd: rank ")]
    return [sum(map(int, re.findall(r": (\d+) calls with ", line))) for line in reports]
