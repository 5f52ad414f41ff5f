"""Kernels with pages of 16 and 64 KiB, as on aarch64 and POWER: emulated by a preloaded library.

Owns the build of that library. What it cannot show are faults of the kernel itself; addresses,
offsets and sizes that such a kernel refuses it refuses too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import meeting_point

__all__: list[str] = []

TESTS = Path(__file__).parent
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def large_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("foreign") / "large_pages.so"
    source = TESTS / "foreign" / "large_pages.c"
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", source]
    subprocess.run([*command, "-o", library], check=True)
    return library


def run_ranks(size: int, variables: dict[str, str], *more: str) -> list[str]:
    path = meeting_point()
    ranks = [
        subprocess.Popen(
            [sys.executable, TESTS / "foreign_programs.py", path, str(rank), str(size), *more],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    return said


@pytest.mark.parametrize("page_bytes", [16 << 10, 64 << 10])
def test_all_shared_memory_works_with_large_pages(large_pages: Path, page_bytes: int) -> None:
    variables = {"LD_PRELOAD": str(large_pages), "PAGE_BYTES": str(page_bytes)}
    said = run_ranks(3, variables, *(["torch"] if page_bytes == 64 << 10 else []))
    assert said == [f"all is well with pages of {page_bytes} bytes\n"] * 3
