"""The network plugin of NCCL as it is installed: its path, what it exports, what it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hsgd.base import elf
from hsgd.errors import LaunchError
from hsgd.jobs.launch import nccl_plugin
from toolkit.cluster import Cluster

__all__: list[str] = []

END = Path(__file__).with_name("nccl_net_end.py")


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


def test_a_cut_link_between_nodes_ends_both_ends_with_a_line_on_the_other_host(
    cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    c, handle = cluster(2), str(tmp_path / "handle")
    ends = [
        subprocess.Popen(
            c.command([sys.executable, str(END), role, handle, str(4 << 20)], node),
            env=c.environment({"HSGD_TIMEOUT_S": "4"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, role in ((1, "receive"), (2, "send"))
    ]
    try:
        assert [end.stdout.readline() for end in ends if end.stdout] == ["moved\n"] * 2
        c.set_link(2, "down")
        said = [end.communicate(timeout=60)[0] for end in ends]
    finally:
        c.set_link(2, "up")
        for end in ends:
            end.kill()
            end.wait()
    remote_error = 6
    assert [words.split()[0] for words in said] == [str(remote_error)] * 2, said
    assert "node2 (pid" in said[0]
    assert "node1 (pid" in said[1]


def test_a_plugin_that_does_not_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs" / "launch"
    folder.mkdir(parents=True)
    (tmp_path / "libnccl-net-hsgd.so").write_text("not a library")
    monkeypatch.setattr(nccl_plugin, "__file__", str(folder / "nccl_plugin.py"))
    with pytest.raises(LaunchError, match="does not load"):
        nccl_plugin.loadable()
