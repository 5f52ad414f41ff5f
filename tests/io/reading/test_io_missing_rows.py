"""Rows that are stored nowhere: they are refused by name, and never fill values in silence."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map

from hdf5_samples import collect
from hsgd.errors import DataError
from loaders import loader_of

ROWS = np.arange(20)


def virtual(path, sources, rows=20, name="x"):
    """A file whose dataset has rows [first, stop) of each source (file, dataset, first, stop)."""
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((rows,), "i8")
        for other, dataset, first, stop in sources:
            layout[first:stop] = h5py.VirtualSource(other, dataset, (stop - first,), "i8")
        file.create_virtual_dataset(name, layout)


def no_such_dataset(folder):
    with h5py.File(folder / "part.h5", "w") as file:
        file["other"] = ROWS
    virtual(folder / "a.h5", [("part.h5", "y", 0, 20)])


def a_group_in_its_place(folder):
    with h5py.File(folder / "part.h5", "w") as file:
        file["y/z"] = ROWS
    virtual(folder / "a.h5", [("part.h5", "y", 0, 20)])


def no_such_file(folder):
    virtual(folder / "a.h5", [("part.h5", "y", 0, 20)])


def nested(folder):
    virtual(folder / "a.h5", [("b.h5", "x", 0, 20)])
    virtual(folder / "b.h5", [("c.h5", "x", 0, 20)])
    virtual(folder / "c.h5", [("part.h5", "y", 0, 20)])


def dangling_link(folder):
    with h5py.File(folder / "b.h5", "w") as file:
        file["y"] = h5py.ExternalLink("part.h5", "/y")
    virtual(folder / "a.h5", [("b.h5", "y", 0, 20)])


def too_short(folder):
    with h5py.File(folder / "part.h5", "w") as file:
        file["y"] = ROWS[:12]
    virtual(folder / "a.h5", [("part.h5", "y", 0, 20)])


def too_short_for_a_part(folder):
    with h5py.File(folder / "part.h5", "w") as file:
        file["y"] = ROWS[:12]
    with h5py.File(folder / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((20,), "i8")
        layout[:10] = h5py.VirtualSource("part.h5", "y", (20,), "i8")[:10]
        layout[10:] = h5py.VirtualSource("part.h5", "y", (20,), "i8")[10:]
        file.create_virtual_dataset("x", layout)


def endless_and_too_short(folder):
    """Two sources take turns, and one has fewer rows: HDF5 fills what it lacks."""
    for name, rows in (("part.h5", 4), ("full.h5", 10)):
        with h5py.File(folder / name, "w", libver="latest") as file:
            file.create_dataset("y", data=ROWS[:rows], maxshape=(None,), chunks=(2,))
    endless = h5py.h5s.UNLIMITED
    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        layout = h5py.VirtualLayout((20,), "i8", maxshape=(None,))
        for first, name in enumerate(("part.h5", "full.h5")):
            source = h5py.VirtualSource(name, "y", (10,), "i8", maxshape=(None,))
            layout[first:endless:2] = source[0:endless]
        file.create_virtual_dataset("x", layout)


def no_external_file(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (20,), "i8", external=[(str(folder / "part.raw"), 0, 160)])
    (folder / "part.raw").unlink(missing_ok=True)


def short_external_file(folder):
    no_external_file(folder)
    ROWS[:12].tofile(folder / "part.raw")


def truncated_chunks(folder):
    """A filter that only h5py undoes, in a file whose end is missing, which its header hides."""
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=ROWS, chunks=(5,), scaleoffset=0)
    os.truncate(folder / "a.h5", os.path.getsize(folder / "a.h5") - 40)


MISSING = {
    no_such_dataset: r"a\.h5: /x takes rows from .*part\.h5: y, which is missing",
    a_group_in_its_place: r"a\.h5: /x takes rows from .*part\.h5: y, which is missing",
    no_such_file: r"a\.h5: /x takes rows from the file part\.h5, which is missing",
    nested: r"c\.h5: /x takes rows from the file part\.h5, which is missing",
    dangling_link: r"a\.h5: /x takes rows from .*b\.h5: y, which is a link to the file part\.h5",
    too_short: r"part\.h5: y, which has the shape \(12,\) and not all",
    too_short_for_a_part: r"part\.h5: y, which has the shape \(12,\) and not all",
    endless_and_too_short: r"part\.h5: y, which has the shape \(4,\) and not all",
    no_external_file: r"a\.h5: /x has its rows in .*part\.raw, which is missing",
    short_external_file: r"part\.raw, of which bytes \[0, 160\) are needed and which ends at 96",
    truncated_chunks: r"a\.h5: truncated",
}


@pytest.mark.parametrize("make", MISSING, ids=lambda make: make.__name__)
def test_what_is_missing_is_named_by_loader_info_verify_and_convert(hsgd_data, tmp_path, make):
    make(tmp_path)
    path = tmp_path / "a.h5"
    with pytest.raises(DataError, match=MISSING[make]):
        loader_of(path, 4, as_numpy=True)
    with pytest.raises(DataError, match=MISSING[make]):
        convert_to_slabs(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for command in ("info", "verify"):
        code, _, error = hsgd_data(command, path)
        assert code == 1 and len(error.splitlines()) == 1, error
        assert "missing" in error or "needed" in error or "not all" in error


def test_virtual_datasets_whose_sources_are_whole_are_read_at_any_depth(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["y"] = ROWS
        file["soft"] = h5py.SoftLink("/y")
    virtual(tmp_path / "b.h5", [("part.h5", "soft", 0, 20)])
    virtual(tmp_path / "a.h5", [("b.h5", "x", 0, 20)])
    virtual(tmp_path / "a.h5", [(".", "x", 0, 20)], name="same")
    with h5py.File(tmp_path / "a.h5", "a") as file:  # columns from two sources, rows in turns
        tall, wide = h5py.VirtualLayout((20,), "i8"), h5py.VirtualLayout((20, 2), "i8")
        for first in (0, 1):
            tall[first::2] = h5py.VirtualSource("part.h5", "y", (20,), "i8")[first::2]
            wide[:, first] = h5py.VirtualSource("part.h5", "y", (20,), "i8")
        file.create_virtual_dataset("turns", tall)
        file.create_virtual_dataset("columns", wide)
    found = collect(loader_of(tmp_path / "a.h5", 4, as_numpy=True, shuffle="none"))
    for name in ("x", "same", "turns"):
        np.testing.assert_array_equal(found[name], ROWS)
    np.testing.assert_array_equal(found["columns"], np.stack([ROWS, ROWS], 1))
    # And where HDF5 finds sources: beside the file that a symlink names, and in a folder of a list.
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a.h5").symlink_to(tmp_path / "a.h5")
    assert len(loader_of(tmp_path / "link" / "a.h5", 4, fields=["x"])) == 5
    (tmp_path / "c.h5").write_bytes((tmp_path / "b.h5").read_bytes())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "part.h5").rename(tmp_path / "elsewhere" / "part.h5")
    with pytest.raises(DataError, match=r"part\.h5, which is missing"):
        open_map(tmp_path / "c.h5")
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path / "elsewhere"))
    open_map(tmp_path / "c.h5")


def chunks_never_written(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (8,), "i8", chunks=(4,), maxshape=(None,))[:] = 1
        file["x"].resize((20,))
    return "'x': 3 of 5 chunks were never written"


def filtered_chunks_never_written(path):
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (20,), "i8", chunks=(4,), fletcher32=True, fillvalue=7)
        x[4:8] = 1
    return "'x': 4 of 5 chunks were never written"


def rows_never_written(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (20,), "i8")
    return "'x': none of 20 rows was ever written"


def parts_without_source(path):
    with h5py.File(path.with_name("part.h5"), "w") as file:
        file["y"] = ROWS[:6]
    virtual(path, [("part.h5", "y", 0, 6), ("part.h5", "y", 4, 10), ("part.h5", "y", 14, 20)])
    return "'x': 4 of 20 values have no source"


def columns_without_source(path):
    with h5py.File(path, "w") as file:
        file["y"] = ROWS
        layout = h5py.VirtualLayout((20, 3), "i8")
        layout[:, 1] = h5py.VirtualSource(".", "y", (20,), "i8")
        file.create_virtual_dataset("x", layout)
    return "'x': 40 of 60 values have no source"


def a_source_never_written(path):
    with h5py.File(path.with_name("part.h5"), "w") as file:
        file.create_dataset("y", (20,), "i8", chunks=(4,))[:4] = 1
    virtual(path, [("part.h5", "y", 0, 20)])
    return "part.h5: y, 4 of 5 chunks were never written"


UNWRITTEN = [
    chunks_never_written,
    filtered_chunks_never_written,
    rows_never_written,
    parts_without_source,
    columns_without_source,
    a_source_never_written,
]


@pytest.mark.parametrize("make", UNWRITTEN, ids=lambda make: make.__name__)
def test_what_nobody_wrote_is_refused_and_taken_on_request(hsgd_data, tmp_path, make):
    path = tmp_path / "a.h5"
    text = make(path)
    with pytest.raises(DataError, match=r"never written|no source|was ever written") as caught:
        loader_of(path, 4, fields=["x"])
    assert text in str(caught.value) and "fill_unwritten=True" in str(caught.value)
    code, shown, _ = hsgd_data("info", path)
    assert code == 0 and text in shown and "never written: " in shown
    words = ("convert", path, tmp_path / "out", "--fields", "x", "--quiet")
    code, _, error = hsgd_data(*words)
    assert code == 1 and text in error and "--fill-unwritten" in error
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match="samples have fill values there"):
        loader = loader_of(path, 4, shuffle="none", as_numpy=True, fill_unwritten=True)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(collect(loader)["x"], file["x"][:])
    code, _, error = hsgd_data(*words, "--fill-unwritten")
    assert code == 0 and text in error


def test_rows_of_variable_length_that_nobody_wrote_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (20,), h5py.vlen_dtype(np.int32), chunks=(4,))
        x[0] = [1, 2]
    with pytest.raises(DataError, match="'x': 4 of 5 chunks were never written"):
        convert_to_slabs(tmp_path / "a.h5", tmp_path / "out")


def a_circle_of_one(folder):
    virtual(folder / "a.h5", [(".", "x", 0, 20)])


def a_circle_of_two(folder):
    virtual(folder / "a.h5", [("b.h5", "x", 0, 20)])
    virtual(folder / "b.h5", [("a.h5", "x", 0, 20)])


def a_circle_through_links(folder):
    virtual(folder / "a.h5", [("b.h5", "y", 0, 20)])
    with h5py.File(folder / "b.h5", "w") as file:
        file["y"] = h5py.ExternalLink("c.h5", "/z")
    with h5py.File(folder / "c.h5", "w") as file:
        file["z"] = h5py.SoftLink("/x")
    virtual(folder / "c.h5", [(str(folder / "a.h5"), "x", 0, 20)])


def an_endless_circle(folder):
    """HDF5 opens its sources when somebody asks for the shape."""
    endless = h5py.h5s.UNLIMITED
    for name, other in (("a.h5", "b.h5"), ("b.h5", "a.h5")):
        with h5py.File(folder / name, "w", libver="latest") as file:
            layout = h5py.VirtualLayout((20,), "i8", maxshape=(None,))
            source = h5py.VirtualSource(other, "x", (20,), "i8", maxshape=(None,))
            layout[0:endless] = source[0:endless]
            file.create_virtual_dataset("x", layout)


def a_pipe_as_source(folder):
    os.mkfifo(folder / "pipe")
    virtual(folder / "a.h5", [("pipe", "x", 0, 20)])


def a_pipe_as_endless_source(folder):
    endless = h5py.h5s.UNLIMITED
    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        layout = h5py.VirtualLayout((20,), "i8", maxshape=(None,))
        source = h5py.VirtualSource("pipe", "x", (20,), "i8", maxshape=(None,))
        layout[0:endless] = source[0:endless]
        file.create_virtual_dataset("x", layout)
    os.mkfifo(folder / "pipe")


def a_pipe_as_storage(folder):
    os.mkfifo(folder / "pipe")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (20,), "i8", external=[(str(folder / "pipe"), 0, 160)])


def a_device_as_storage(folder):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", (20,), "i8", external=[("/dev/zero", 0, 160)])


HOSTILE = {
    a_circle_of_one: "takes its rows from itself",
    a_circle_of_two: "takes its rows from itself",
    a_circle_through_links: "takes its rows from itself",
    an_endless_circle: "takes its rows from itself",
    a_pipe_as_source: "pipe, which is no file",
    a_pipe_as_endless_source: "pipe, which is no file",
    a_pipe_as_storage: "pipe, which is no file",
    a_device_as_storage: "/dev/zero, which is no file",
}
_LOADER = "import sys; from hsgd.io import PartitionedLoader as L; L(sys.argv[1], 4, 0, 1)"


@pytest.mark.long
@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_circles_and_pipes_are_refused_before_hdf5_reads(tmp_path, make):
    """In processes of their own: HDF5 would end them, or wait for ever."""
    make(tmp_path)
    path = str(tmp_path / "a.h5")
    data = [sys.executable, "-m", "hsgd", "data"]
    for command in (
        [sys.executable, "-c", _LOADER, path],
        [*data, "info", path],
        [*data, "verify", path],
        [*data, "convert", path, str(tmp_path / "out")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1, (command, done)
        assert HOSTILE[make] in done.stderr.splitlines()[-1]
