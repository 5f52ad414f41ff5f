"""Kernels with pages of 16 and 64 KiB, as on aarch64 and POWER: emulated by a preloaded library.

Owns the build of that library. What it cannot show are faults of the kernel itself; addresses,
offsets and sizes that such a kernel refuses it refuses too.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from foreign_ranks import run_ranks

__all__: list[str] = []

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def large_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("foreign") / "large_pages.so"
    source = TESTS / "foreign" / "large_pages.c"
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", source]
    subprocess.run([*command, "-o", library], check=True)
    return library


@pytest.mark.long
@pytest.mark.parametrize("page_bytes", [16 << 10, 64 << 10])
def test_all_shared_memory_works_with_large_pages(large_pages: Path, page_bytes: int) -> None:
    words = ["torch"] if page_bytes == 64 << 10 else []
    variables = {"LD_PRELOAD": str(large_pages), "PAGE_BYTES": str(page_bytes)}
    output = run_ranks(*words, size=3, variables=variables)
    assert output == [f"all is well with pages of {page_bytes} bytes\n"] * 3
