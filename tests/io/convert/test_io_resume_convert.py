"""A conversion that was killed goes on: same files in the end, little done twice."""

from __future__ import annotations

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map
from hsgd.io.convert import shuffle_passes, staged_folder
from hsgd.io.convert.array_sources import ArraySource
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.convert.record_sources import (
    CsvSource,
    ImageFolderSource,
    ParquetSource,
    TarSource,
)
from hsgd.io.convert.sources import Hdf5Source, NumpySource, open_source

from hdf5_samples import arrays_of, write_hdf5
from hsgd.errors import DataError

# Converts again and again, in forks that kill themselves at a step that a random number chooses,
# until one comes through; tells how many lives that took, and the rows that the last one streamed.
KILL = """\
import os, random, signal, sys
import h5py
from hsgd.io.convert import convert_to_slabs as conversion, shuffle_passes, sources
from hsgd.io.convert import slab_folder_writer as writer
from hsgd.io import convert_to_slabs
from hsgd.io.reading import row_copies

source, target, seed, most, permute, compress = sys.argv[1:]
draw = random.Random(int(seed))
shuffle_passes.BLOCK_BYTES, shuffle_passes._CHECKPOINT_BYTES, writer.CHECKSUM_BYTES = 64, 200, 100
ends = os.open("ends", os.O_CREAT | os.O_RDWR | os.O_TRUNC)

def die_at(step):
    count = [0]
    def counted(call):
        def wrapper(*arguments, **options):
            count[0] += 1
            if count[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return wrapper
    for module, name in ((os, "pwrite"), (os, "fsync"), (os, "rename"), (os, "replace"),
                         (os, "mkdir"), (row_copies, "crc32c")):
        setattr(module, name, counted(getattr(module, name)))

def convert_once(step):
    die_at(step)
    rows = [0]
    stream = sources.NumpySource.stream
    def counted(self, spec, count, start=0):
        for block in stream(self, spec, count, start):
            rows[0] += len(block)
            yield block
    sources.NumpySource.stream = counted
    options = {"permute": permute == "1", "compress": compress or None}
    convert_to_slabs(source, target, num_slabs=7, seed=3, **options)
    os.write(ends, b"%d" % rows[0])

lives = 0
while True:
    lives += 1
    step = draw.randint(1, int(most))
    pid = os.fork()
    if pid == 0:
        convert_once(step)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    if os.path.exists(target):
        os.write(ends, b"0")
        break
    assert lives < 300
print(lives, os.pread(ends, 20, 0).decode())
"""


def contents(folder):
    """All that a slab folder holds, besides its uuid."""
    found = {}
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            attrs = {name: v for name, v in file.attrs.items() if name != "dataset_uuid"}
            rows = {name: dataset[()].tolist() for name, dataset in file.items()}
            sums = {name: list(dataset.attrs.get("crc32c", ())) for name, dataset in file.items()}
            found[path.name] = (attrs, rows, sums)
    return found


@pytest.mark.parametrize(
    ("permute", "seed", "compress"),
    [(True, 0, None), (True, 1, None), (False, 0, None), (False, 1, None), (True, 2, "gzip")],
)
def test_a_conversion_killed_at_random_steps_gives_the_files_of_one_that_was_not(
    tmp_path, monkeypatch, permute, seed, compress
):
    np.savez(tmp_path / "a.npz", **arrays_of(101))
    words = [str(tmp_path / "a.npz"), str(tmp_path / "out"), str(seed), "150", str(int(permute))]
    words.append(compress or "")
    done = subprocess.run(
        [sys.executable, "-c", KILL, *words],
        cwd=tmp_path,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lives, streamed = (int(word) for word in done.stdout.split())
    assert lives > 3
    assert streamed < 4 * 101  # the last one did not begin anew
    monkeypatch.setattr(shuffle_passes, "BLOCK_BYTES", 64)
    monkeypatch.setattr("hsgd.io.convert.slab_folder_writer.CHECKSUM_BYTES", 100)
    options = {"permute": permute, "compress": compress}
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "whole", num_slabs=7, seed=3, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert list(find_damage(open_map(tmp_path / "out"))) == []
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7, seed=3, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "ends", "out", "whole"]


class Interrupted(BaseException):
    """What Ctrl-C is."""


def interrupt(monkeypatch, tmp_path, **options):
    """Begin a conversion of a.npz to out, and leave it in the middle; the hidden folder."""

    def leave(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(shuffle_passes, "_CHECKPOINT_BYTES", 100)
        patch.setattr(shuffle_passes.Passes, "_order_slabs", leave)
        with pytest.raises(Interrupted):
            convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7, **options)
    hidden = tmp_path / ".out.part"
    assert not (tmp_path / "out").exists()
    assert list(hidden.glob("journal-*.json"))
    return hidden


def uuid_of(hidden):
    return json.loads((hidden / "conversion.json").read_text())["dataset_uuid"]


def test_what_was_left_is_taken_up_for_the_same_conversion_only(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **arrays_of(101))
    left = uuid_of(interrupt(monkeypatch, tmp_path))
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7, seed=1)
    assert open_map(tmp_path / "out").header.dataset_uuid != left
    assert not (tmp_path / ".out.part").exists()


def test_a_source_that_changed_meanwhile_is_converted_anew(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **arrays_of(101))
    left = uuid_of(interrupt(monkeypatch, tmp_path))
    again = uuid_of(interrupt(monkeypatch, tmp_path))
    assert left == again
    np.savez(tmp_path / "a.npz", **arrays_of(103))
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7)
    found = open_map(tmp_path / "out")
    assert (found.num_samples, found.header.dataset_uuid != left) == (103, True)


def test_an_error_after_a_checkpoint_keeps_what_is_done_and_says_so(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **arrays_of(101))

    def fail(*_):
        raise OSError(5, "Input/output error", "slab-00001.h5")

    with monkeypatch.context() as patch:
        patch.setattr(shuffle_passes, "_CHECKPOINT_BYTES", 100)
        patch.setattr(shuffle_passes.Passes, "_order_slabs", fail)
        with pytest.raises(DataError, match=r"Input/output error; the same command goes on from"):
            convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7)
    left = uuid_of(tmp_path / ".out.part")
    convert_to_slabs(tmp_path / "a.npz", tmp_path / "out", num_slabs=7)
    assert open_map(tmp_path / "out").header.dataset_uuid == left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "out"]


def test_two_conversions_to_one_target_do_not_mix(tmp_path):
    with (
        staged_folder.staged_folder(tmp_path / "out", {}),
        pytest.raises(DataError, match=r"another process is converting to .*out; wait for it"),
        staged_folder.staged_folder(tmp_path / "out", {}),
    ):
        pytest.fail("not reached")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def npy_source(folder):
    np.save(folder / "x.npy", np.arange(60).reshape(30, 2))
    return open_source(str(folder / "x.npy")), NumpySource


def npz_source(folder):
    np.savez_compressed(folder / "x.npz", x=np.arange(60).reshape(30, 2))
    return open_source(str(folder / "x.npz")), NumpySource


def array_source(folder):
    return ArraySource({"x": np.arange(60).reshape(30, 2)}), ArraySource


def hdf5_source(folder):
    return open_source(str(write_hdf5(folder / "x.h5", {"x": np.arange(30)}))), Hdf5Source


def csv_source(folder):
    pytest.importorskip("pandas")
    (folder / "x.csv").write_text("x\n" + "".join(f"{n}\n" for n in range(30)))
    return open_source(str(folder / "x.csv")), CsvSource


def parquet_source(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": np.arange(30)}), folder / "x.parquet", row_group_size=8)
    return open_source(str(folder / "x.parquet")), ParquetSource


def tar_source(folder):
    import io
    import tarfile

    with tarfile.open(folder / "x.tar", "w") as archive:
        for number in range(30):
            member = tarfile.TarInfo(f"{number:03d}.cls")
            member.size = len(text := str(number).encode())
            archive.addfile(member, io.BytesIO(text))
    return open_source(str(folder / "x.tar")), TarSource


def image_source(folder):
    image = pytest.importorskip("PIL.Image")
    for label in ("a", "b"):
        (folder / label).mkdir()
        for number in range(15):
            image.new("RGB", (2, 2), (number, 0, 0)).save(folder / label / f"{number:02d}.png")
    return open_source(str(folder)), ImageFolderSource


@pytest.mark.parametrize(
    "make",
    [
        npy_source,
        npz_source,
        array_source,
        hdf5_source,
        csv_source,
        parquet_source,
        tar_source,
        image_source,
    ],
)
def test_every_source_streams_from_the_middle(tmp_path, monkeypatch, make):
    monkeypatch.setattr(CsvSource, "_CHUNK", 7)
    source, kind = make(tmp_path)
    assert isinstance(source, kind)
    for spec in source.specs:
        whole = np.concatenate([block.copy() for block in source.stream(spec, 8)])
        assert len(whole) == 30
        for start in (0, 1, 8, 23, 30):
            blocks = [block.copy() for block in source.stream(spec, 8, start)]
            assert all(len(block) <= 8 for block in blocks)
            found = np.concatenate([np.empty((0, *spec.shape), spec.dtype), *blocks])
            np.testing.assert_array_equal(found, whole[start:])
