"""SampleWriter: samples of a program as a slab folder, whole or not at all."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hsgd.io import Ragged, SampleWriter

from hdf5_samples import collect
from hsgd.errors import DataError
from loaders import loader_of

COUNT = 37


def run_writer(program, target):
    """The lines that a process of its own printed."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(target)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def image(number):
    return np.full((2, 3), number, np.float32)


def read(path, **options):
    """The samples of a folder, by number."""
    found = collect(loader_of(path, 5, as_numpy=True, **options))
    order = np.argsort(found["number"])
    return {name: values[order] for name, values in found.items()}


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_samples_written_one_by_one_and_in_batches_are_read_back(tmp_path, compress):
    with SampleWriter(tmp_path / "out", num_slabs=4, compress=compress) as writer:
        for number in range(20):
            writer.write({"number": number, "image": image(number)})
        numbers = np.arange(20, COUNT)
        writer.write_batch({"image": np.stack([image(n) for n in numbers]), "number": numbers})
        assert len(writer) == COUNT
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = read(tmp_path / "out", verify=True)
    assert found["number"].dtype == np.int64
    assert found["number"].tolist() == list(range(COUNT))
    np.testing.assert_array_equal(found["image"], np.stack([image(n) for n in range(COUNT)]))


def test_fields_of_any_length_take_arrays_bytes_and_ragged_batches(tmp_path):
    texts = [b"word" * (n % 4) for n in range(COUNT)]
    with SampleWriter(tmp_path / "out", ragged=["text"], permute=False, num_slabs=2) as writer:
        for text in texts[:10]:
            writer.write({"text": text})
        writer.write_batch({"text": texts[10:20]})
        values = np.frombuffer(b"xx" + b"".join(texts[20:]), np.uint8)
        ends = 2 + np.cumsum([len(text) for text in texts[20:]])
        writer.write_batch({"text": Ragged(values, np.concatenate([[2], ends]))})
    batches = loader_of(tmp_path / "out", 5, shuffle="none", as_numpy=True)
    assert [bytes(row) for batch in batches for row in batch["text"]] == texts


def test_a_ragged_field_may_hold_nothing(tmp_path):
    with SampleWriter(tmp_path / "out", ragged=["text"], num_slabs=1) as writer:
        writer.write_batch({"text": [b"", b""], "number": [1, 2]})
    (batch,) = loader_of(tmp_path / "out", 2, as_numpy=True)
    assert [len(row) for row in batch["text"]] == [0, 0]


@pytest.mark.parametrize(
    ("sample", "error", "text"),
    [
        ({"number": 1}, ValueError, "has the fields number; expected: number, image"),
        ({"number": 1, "image": image(1), "x": 1}, ValueError, "expected: number, image"),
        ({"number": 1, "image": np.zeros(3, np.float32)}, ValueError, r"shape \(3,\).*ragged="),
        ({"number": 1.5, "image": image(1)}, TypeError, "'number' is float64.*was int64"),
        ({"number": "one", "image": image(1)}, TypeError, "'number' is <U3; only numbers"),
    ],
)
def test_a_sample_unlike_the_first_is_refused_and_nothing_is_written(tmp_path, sample, error, text):
    with SampleWriter(tmp_path / "out", num_slabs=1) as writer:
        writer.write({"number": 0, "image": image(0)})
        with pytest.raises(error, match=text):
            writer.write(sample)
        writer.write({"number": 1, "image": image(1)})
    assert read(tmp_path / "out")["number"].tolist() == [0, 1]


def test_what_is_no_batch_is_refused(tmp_path):
    with SampleWriter(tmp_path / "out", ragged=["text"], num_slabs=1) as writer:
        for batch, text in (
            ({"number": [1, 2], "text": [b"a"]}, "numbers of samples differ: number 2, text 1"),
            ({"number": 1, "text": [b"a"]}, "'number' got one value for a batch"),
            ({"number": [1], "text": []}, "'text': a batch of no samples"),
            ({"number": [1]}, "expected: number, text"),
            ({"number": [1, 1], "text": [np.zeros(2), np.zeros((1, 2))]}, "first axis"),
        ):
            with pytest.raises(ValueError, match=text):
                writer.write_batch(batch)
        with pytest.raises(ValueError, match="'text' is ragged and got one value"):
            writer.write({"number": 1, "text": 3})
        writer.write({"number": 1, "text": b"a"})


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    def produce():
        with SampleWriter(tmp_path / "out") as writer:
            writer.write({"number": 0})
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        produce()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path):
    writer = SampleWriter(tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 1
    del writer
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from hsgd.io import SampleWriter
writer = SampleWriter(sys.argv[1])
writer.write({"number": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], timeout=60, check=False)
    (left,) = tmp_path.iterdir()
    with SampleWriter(tmp_path / "out") as writer:
        assert not left.exists()
        writer.write({"number": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_next_writer_leaves_those_of_living_ones_and_of_other_hosts(tmp_path):
    elsewhere = tmp_path / ".out.another-host.x.samples"
    elsewhere.mkdir()
    with SampleWriter(tmp_path / "out", overwrite=True) as first:
        first.write({"number": 1})
        with SampleWriter(tmp_path / "out", overwrite=True) as second:
            second.write({"number": 2})
    assert elsewhere.is_dir()
    assert read(tmp_path / "out")["number"].tolist() == [1]


def test_no_sample_makes_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no sample was written"):
        SampleWriter(tmp_path / "out").close()
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_exists_is_kept_until_the_new_one_is_whole(tmp_path):
    for first in (0, 100):
        with SampleWriter(tmp_path / "out", num_slabs=1, overwrite=bool(first)) as writer:
            writer.write({"number": first})
    assert read(tmp_path / "out")["number"].tolist() == [100]
    with pytest.raises(DataError, match="out exists; choose another name or replace it"):
        SampleWriter(tmp_path / "out")


def test_after_an_error_of_close_the_samples_are_still_there(tmp_path):
    writer = SampleWriter(tmp_path / "out", num_slabs=1)
    writer.write({"number": 7})
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(DataError, match="out exists and is not a folder"):
        writer.close()
    (tmp_path / "out").unlink()
    writer.close()
    writer.close()
    assert read(tmp_path / "out")["number"].tolist() == [7]
    with pytest.raises(ValueError, match="this writer is closed"):
        writer.write({"number": 8})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.uint8([0, 0]), np.uint16([300, 65535])),
        (np.int8([1, 1]), np.int64([300, 1])),
        (np.float32([1, 1]), np.float64([1e300, 1])),
        (np.int64([1, 1]), np.float64([1.5, 1])),
    ],
)
def test_values_that_the_dtype_of_the_first_sample_does_not_hold_are_refused(
    tmp_path, first, second
):
    with SampleWriter(tmp_path / "out", num_slabs=1) as writer:
        writer.write({"x": first})
        with pytest.raises(TypeError, match="does not hold its values"):
            writer.write({"x": second})
        same_kind = second.dtype.kind == first.dtype.kind  # then values that fit are taken
        writer.write({"x": np.array([7, 8], second.dtype if same_kind else first.dtype)})
    (batch,) = loader_of(tmp_path / "out", 2, shuffle="none", as_numpy=True)
    assert sorted(batch["x"].tolist()) == sorted([first.tolist(), [7, 8]])
    assert batch["x"].dtype == first.dtype


def test_an_empty_ragged_sample_keeps_the_dtype(tmp_path):
    with SampleWriter(tmp_path / "out", ragged=["tokens"], num_slabs=1, permute=False) as writer:
        for tokens in ([1, 2], [], [3]):
            writer.write({"tokens": tokens})
    (batch,) = loader_of(tmp_path / "out", 3, shuffle="none", as_numpy=True)
    assert [row.tolist() for row in batch["tokens"]] == [[1, 2], [], [3]]


def test_a_sample_that_was_cut_off_by_a_full_disk_spoils_no_other(tmp_path):
    child = """
import resource, signal, sys
import numpy as np
from hsgd.io import SampleWriter
from hsgd.errors import DataError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
writer = SampleWriter(sys.argv[1])
lines = []
for call in [lambda n=n: writer.write({"image": np.full(2_000_000, n, np.uint8), "label": n})
             for n in range(5)] + [writer.close]:
    try:
        call()
    except DataError as error:
        lines.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if len(lines) else 4 << 20, hard))
print("\\n".join(lines))
"""
    lines = run_writer(child, tmp_path / "out")
    assert "writing failed: File too large" in lines[0]
    assert all("written in part" in line for line in lines[1:]) and len(lines) >= 3
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_ends_leaves_the_samples(tmp_path):
    child = """
import os, sys
from hsgd.io import SampleWriter
writer = SampleWriter(sys.argv[1], num_slabs=1)
writer.write({"number": 7})
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
writer.close()
"""
    assert run_writer(child, tmp_path / "out") == []
    assert read(tmp_path / "out")["number"].tolist() == [7]
