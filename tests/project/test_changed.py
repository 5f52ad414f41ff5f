"""`make check` finds the tests that are near to a change."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def changed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed", ROOT / "tests/changed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("docs/start/mpi.md", "tests/project/test_site.py"),
        (".ci/site/reference.py", "tests/project/test_site.py"),
        ("README.md", "tests/project/test_readme.py"),
        ("hsgd/config.py", "tests/core/test_config.py"),
        ("hsgd/tools/doctor/checkup.py", "tests/launch/test_doctor.py"),
        ("hsgd/optim/large_batch/lars.py", "tests/project/test_sources.py"),
        ("tests/core/test_comm.py", "tests/core/test_comm.py"),
    ],
)
def test_a_change_leads_to_its_test(changed: ModuleType, file: str, test: str) -> None:
    assert ROOT / test in changed.python_tests([ROOT / file])


@pytest.mark.long
def test_a_page_leads_to_no_test_of_collectives(changed: ModuleType) -> None:
    found = {path.stem for path in changed.python_tests([ROOT / "docs/start/mpi.md"])}
    assert found == {"test_architecture", "test_sources", "test_site", "test_docs"}


def test_a_folder_of_the_core_leads_to_its_native_programs(changed: ModuleType) -> None:
    programs = changed.native_programs([ROOT / "hsgd/csrc/onesided/tree/gradient_tree.cpp"])
    assert "test_gradient_tree" in programs and "test_reduce" not in programs


def test_the_nearest_tests_come_first(changed: ModuleType) -> None:
    files = [
        ROOT / "hsgd/base/mpi_abi.py",
        ROOT / "hsgd/config.py",
        ROOT / "tests/core/test_split.py",
    ]
    names = [path.stem for path in changed.python_tests(files)]
    assert names[0] == "test_split"
    assert names.index("test_config") < names.index("test_packaging")
    names = [path.stem for path in changed.python_tests([ROOT / "hsgd/comm/communicator.py"])]
    assert names[0] == "test_comm"  # its name begins as the file's


@pytest.mark.long
def test_after_the_budget_no_test_begins_and_the_summary_says_so(tmp_path: Path) -> None:
    for name in ("conftest.py", "support", "toolkit"):
        (tmp_path / name).symlink_to(ROOT / "tests" / name)
    tests = (tmp_path / "test_both").with_suffix(".py")
    tests.write_text("def test_one(): pass\ndef test_two(): pass\n")
    words = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", tests.name]
    done = subprocess.run(
        [*words, "--budget", "0"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "2 skipped" in done.stdout and "left out: 0 s are over" in done.stdout, done.stdout
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout
