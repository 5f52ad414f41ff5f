"""What a file names outside of itself: no device, pipe or socket, and nothing of the system."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import h5py
import pytest
from hsgd.io import open_map
from hsgd.io.format.link_guard import no_file

from hsgd.errors import DataError

__all__: list[str] = []

# A regular file of some bytes, as every Linux has.
SYSTEM = next(
    each
    for each in ("/sys/kernel/notes", "/sys/kernel/warn_count", "/proc/self/environ")
    if os.path.isfile(each)
)


def storage(path: Path, name: str) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8,), "u1", external=[(name, 0, 8)])


def link(path: Path, name: str) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = h5py.ExternalLink(name, "/x")
        file["y"] = range(8)


def source(path: Path, name: str) -> None:
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((8,), "u1")
        layout[:] = h5py.VirtualSource(name, "x", (8,))
        file.create_virtual_dataset("x", layout)


def lines(path: Path, hsgd_data) -> list[str]:
    """What open_map, info and convert say; each refuses, or leaves the link out."""
    try:
        told = [open_map(path).left_out["x"]]
    except DataError as error:
        told = [str(error)]
    for words in (["info", path], ["convert", path, path.parent / "copy"]):
        _, out, err = hsgd_data(*words)
        told.append(next(line for line in (out + err).splitlines() if "which is" in line))
    return told


@pytest.mark.parametrize("make", [storage, link, source])
@pytest.mark.parametrize("way", ["plain", "twice", "above", "symlink"])
def test_files_of_the_system_are_no_data(tmp_path, hsgd_data, make, way):
    (tmp_path / "b.h5").symlink_to(SYSTEM)
    above = os.path.relpath(SYSTEM, Path.cwd() if make is storage else tmp_path)
    names = {"plain": SYSTEM, "twice": f"/{SYSTEM}", "above": above}
    make(tmp_path / "a.h5", names.get(way, str(tmp_path / "b.h5")))
    for line in lines(tmp_path / "a.h5", hsgd_data):
        assert "which is part of the system and no data" in line


@pytest.mark.parametrize("make", [storage, link, source])
@pytest.mark.parametrize("kind", ["device", "pipe", "socket"])
def test_what_is_no_file_is_not_opened(tmp_path, hsgd_data, make, kind):
    place = "/dev/zero" if kind == "device" else str(tmp_path / "b.h5")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place)
    make(tmp_path / "a.h5", place)
    for line in lines(tmp_path / "a.h5", hsgd_data):
        assert f"{place}, which is no file" in line


def test_shared_memory_may_hold_data(monkeypatch):
    monkeypatch.setattr(os.path, "isfile", lambda place: True)
    assert not no_file(Path("/dev/shm/data/part.h5"))
    assert no_file(Path("/dev/shm/../mem")) and no_file(Path("/dev/shm"))


@pytest.mark.parametrize("how", ["plain", "above", "symlink"])
def test_storage_outside_of_the_folder_must_be_allowed(tmp_path, monkeypatch, how):
    """Any file of the user could be named there, and would be delivered as samples."""
    secret, folder = tmp_path / "secret" / "key", tmp_path / "data"
    for each in (secret.parent, folder):
        each.mkdir()
    secret.write_bytes(bytes(range(8)))
    (folder / "link").symlink_to(secret)
    names = {"plain": str(secret), "above": "../secret/key", "symlink": str(folder / "link")}
    monkeypatch.chdir(folder)
    storage(folder / "a.h5", names[how])
    with pytest.raises(DataError, match=r"outside of the folders .* export HDF5_EXTFILE_PREFIX="):
        open_map(folder / "a.h5")
    monkeypatch.setenv("HDF5_EXTFILE_PREFIX", str(secret.parent))
    if how == "above":
        storage(folder / "a.h5", "key")
    assert open_map(folder / "a.h5").num_samples == 8
