"""The patch of docs/internals/worked_changes.md fits the sources, and the page tells of each file.
`make worked-changes` builds it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from worked_changes import PATCHES, ROOT, added_tests, changed_files

__all__: list[str] = []

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs/internals/worked_changes.md").read_text()


def named(patch: Path) -> str:
    return patch.stem


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_a_patch_fits_the_sources(patch: Path) -> None:
    check = ["git", "apply", "--check", str(patch)]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}make the change again, on the sources as they are"


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_the_page_names_a_patch_and_each_file_that_it_changes(patch: Path) -> None:
    assert f"](worked_changes/{patch.name})" in PAGE
    begin = PAGE.index(f"](worked_changes/{patch.name})")
    section = PAGE[begin:].partition("\n## ")[0]
    assert [name for name in changed_files(patch) if f"`{name}`" not in section] == []
    assert added_tests(patch)


def test_the_lines_that_the_page_quotes_are_in_a_patch() -> None:
    patches = {line for patch in PATCHES for line in patch.read_text().splitlines()}
    quoted = re.findall(r"^[+-].+$", PAGE, re.MULTILINE)
    lines = [line for line in quoted if not line.startswith("- ")]
    assert lines and [line for line in lines if line not in patches] == []
