"""The network plugin of NCCL as it is installed: its path, what it exports, what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hsgd.base import elf
from hsgd.errors import LaunchError
from hsgd.jobs.launch import nccl_plugin

__all__: list[str] = []


def test_the_command_prints_the_path_of_a_plugin_that_loads() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hsgd", "nccl-plugin"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, Path(done.stdout.rstrip())) == (0, nccl_plugin.library()), done.stderr


def test_it_exports_the_tables_and_nothing_else() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=just-symbols", nccl_plugin.library()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert set(symbols.stdout.split()) == {f"ncclNetPlugin_v{number}" for number in range(6, 13)}


def test_it_needs_neither_python_nor_torch_nor_other_libraries_of_hsgd() -> None:
    needed = elf.read_library(str(nccl_plugin.library())).needed
    known = ("libc.", "libstdc++.", "libgcc_s.", "libm.", "libpthread.", "librt.", "ld-linux")
    assert [name for name in needed if not name.startswith(known)] == []


def test_a_path_that_nccl_would_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a,b" / "jobs" / "launch"
    folder.mkdir(parents=True)
    monkeypatch.setattr(nccl_plugin, "__file__", str(folder / "nccl_plugin.py"))
    with pytest.raises(LaunchError, match="is missing"):
        nccl_plugin.library()
    shutil.copy(Path(elf.__file__).parents[1] / "libnccl-net-hsgd.so", tmp_path / "a,b")
    with pytest.raises(LaunchError, match="comma"):
        nccl_plugin.library()


def test_a_plugin_that_does_not_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs" / "launch"
    folder.mkdir(parents=True)
    (tmp_path / "libnccl-net-hsgd.so").write_text("not a library")
    monkeypatch.setattr(nccl_plugin, "__file__", str(folder / "nccl_plugin.py"))
    with pytest.raises(LaunchError, match="does not load"):
        nccl_plugin.loadable()
