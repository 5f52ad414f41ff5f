"""libhsgd_io: rows to addresses, checksums, errors."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hsgd.io.native_library import native_library
from hsgd.io.reading import row_copies


def crc_by_bits(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_that_of_the_standard():
    assert row_copies.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert row_copies.crc32c(np.zeros(32, np.uint8)) == 0x8A9136AA  # RFC 3720, B.4
    assert row_copies.crc32c(np.empty(0, np.uint8)) == 0


@pytest.mark.parametrize("count", [1, 7, 8, 9, 6143, 6144, 6145, 20_000])
def test_checksums_of_any_length_agree_with_the_definition_and_can_go_on(count):
    data = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    expected = crc_by_bits(data.tobytes())
    assert row_copies.crc32c(data) == expected
    assert row_copies.crc32c(data[count // 3 :], row_copies.crc32c(data[: count // 3])) == expected


@pytest.fixture
def table(tmp_path):
    """A file of 100 rows of 7 bytes after 5 other bytes, open."""
    rows = np.random.default_rng(1).integers(0, 256, (100, 7), np.uint8)
    (tmp_path / "a").write_bytes(b"-" * 5 + rows.tobytes())
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    yield descriptor, rows
    os.close(descriptor)


def do(descriptor, starts, counts, places, checksums=None):
    """One task; its record, and whether this thread was the last."""
    starts, counts = np.array(starts), np.array(counts)
    task = np.zeros(1, row_copies.TASK)
    task["offset"], task["row_bytes"], task["ranges"] = 5, 7, len(starts)
    task["starts"], task["counts"] = starts.ctypes.data, counts.ctypes.data
    task["places"], task["alignment"], task["file"] = places.ctypes.data, 1, descriptor
    if checksums is not None:
        checksums = np.array(checksums, np.uint32)
        task["checksums"] = checksums.ctypes.data
    batch = row_copies.TaskBatch(task, None)
    was_last = batch.work(row_copies.Staging(8192))
    assert not batch.has_work()
    return task[0], was_last


def test_rows_of_ranges_go_to_their_places_and_unwanted_ones_nowhere(table):
    descriptor, rows = table
    out = np.zeros((3, 7), np.uint8)
    places = (out.ctypes.data + 7 * np.array([2, 0, 0, 1])).astype(np.uint64)
    places[1] = 0
    task, was_last = do(descriptor, [90, 10], [1, 3], places)
    assert (task["status"], was_last) == (0, True)
    np.testing.assert_array_equal(out, rows[[11, 12, 90]])


SIZES = [1, 2, 3, 4, 7, 8, 16, 24, 3000]


def rows_of_batches(draw, rows, batch_size, shuffled):
    """Places of `rows` rows in batches, shuffled or in runs, some of them unwanted."""
    order = draw.permutation(rows) if shuffled else np.arange(rows)
    batch, row = np.divmod(order + 3, batch_size)  # the first batch has three rows already
    places = row_copies.batch_rows(batch, row)
    places[draw.random(rows) < 0.1] = 0
    return places


@pytest.mark.parametrize("way", ["staged", "checked", "from memory"])
@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in runs"])
@pytest.mark.parametrize("size", SIZES)
def test_rows_go_to_rows_of_batches(tmp_path, size, shuffled, way):
    draw = np.random.default_rng(size)
    rows, batch_size, offset = 5000 if size < 100 else 40, 64, 11
    data = draw.integers(0, 256, (rows, size), np.uint8)
    (tmp_path / "a").write_bytes(b"-" * 5 + data.tobytes())
    batches = np.zeros((rows // batch_size + 2, offset + batch_size * size), np.uint8)
    order = draw.permutation(len(batches))  # they lie anywhere in memory
    bases = batches.ctypes.data + batches.shape[1] * order.astype(np.uint64)
    half = rows // 2
    starts, counts = np.array([half, 0]), np.array([rows - half, half])
    places = rows_of_batches(draw, rows, batch_size, shuffled)
    task = np.zeros(1, row_copies.TASK)
    task["offset"], task["row_bytes"], task["ranges"] = 5, size, 2
    task["starts"], task["counts"] = starts.ctypes.data, counts.ctypes.data
    task["places"], task["bases"] = places.ctypes.data, bases.ctypes.data
    task["base_offset"], task["alignment"] = offset, 1
    read = np.concatenate([data[half:], data[:half]])
    checksums = np.array([row_copies.crc32c(data[half:]), row_copies.crc32c(data[:half])], "u4")
    if way == "checked":
        task["checksums"] = checksums.ctypes.data
    if way == "from memory":
        task["memory"], task["offset"] = data.ctypes.data, 0
    with open(tmp_path / "a", "rb") as file:
        task["file"] = file.fileno()
        row_copies.TaskBatch(task, None).work(
            row_copies.Staging(1 << 18 if way == "checked" else 1)
        )
    assert task["status"][0] == 0
    expected = np.zeros_like(batches)
    batch, row = (
        (places >> np.uint64(32)).astype(int) - 1,
        (places & np.uint64(2**32 - 1)).astype(int),
    )
    for k in np.flatnonzero(places):
        first = offset + row[k] * size
        expected[order[batch[k]], first : first + size] = read[k]
    np.testing.assert_array_equal(batches, expected)
    addresses = row_copies.addresses_of(places, bases, offset, size)
    assert (addresses[places == 0] == 0).all()
    batches[:] = 0
    row_copies.move_rows(read, addresses)
    np.testing.assert_array_equal(batches, expected)


def test_a_file_that_ends_early_and_a_bad_descriptor_are_told_with_the_byte(table):
    descriptor, _ = table
    out = np.zeros((4, 7), np.uint8)
    places = (out.ctypes.data + 7 * np.arange(4)).astype(np.uint64)
    task, _ = do(descriptor, [98], [4], places)
    assert (task["status"], task["position"]) == (row_copies.END, 5 + 700)
    assert do(-1, [0], [4], places)[0]["status"] == errno.EBADF


def test_a_range_with_a_wrong_checksum_is_not_delivered(table):
    descriptor, rows = table
    out = np.zeros((4, 7), np.uint8)
    places = (out.ctypes.data + 7 * np.arange(4)).astype(np.uint64)
    right = [row_copies.crc32c(rows[0:2]), row_copies.crc32c(rows[50:52])]
    assert do(descriptor, [0, 50], [2, 2], places, right)[0]["status"] == 0
    np.testing.assert_array_equal(out, rows[[0, 1, 50, 51]])
    out[:] = 0
    task, _ = do(descriptor, [0, 50], [2, 2], places, [right[0], right[1] ^ 1])
    assert (task["status"], task["position"]) == (row_copies.MISMATCH, 5 + 350)
    np.testing.assert_array_equal(out[2:], 0)


@pytest.mark.parametrize("loops", [0, 1] if platform.machine() == "x86_64" else [0])
def test_images_are_scaled_alike_without_the_loops_of_this_processor(tmp_path, monkeypatch, loops):
    built, source = tmp_path / "libresize.so", Path(__file__).parents[3] / "io/csrc/resize.cpp"
    flags = f"-std=c++17 -O1 -shared -fPIC -DHSGD_IO_LOOPS={loops}"
    compiler = (os.environ.get("CXX") or "c++").split()
    subprocess.run([*compiler, *flags.split(), str(source), "-o", str(built)], check=True)
    other = ctypes.CDLL(str(built))
    pointer = ctypes.c_void_p
    other.hsgd_io_crop_image.argtypes = [pointer, pointer, ctypes.c_int64]
    other.hsgd_io_crop_image.restype = ctypes.c_int64
    own, draw = native_library(), np.random.default_rng(loops)
    for number in range(200):
        height, width = draw.integers(1, 400, 2)
        pixels = draw.integers(0, 256, (height, width, 3), np.uint8)
        left, top = draw.random(2) * (width, height) * 0.9
        wide, high = (0.02 + 0.98 * draw.random(2)) * (width - left, height - top)
        size = int(draw.choice([1, 2, 3, 4, 5, 31, 64, 224]))
        found = []
        for library in (own, other):
            monkeypatch.setattr(row_copies, "native_library", lambda chosen=library: chosen)
            to = np.zeros((size + 1, size, 3), np.uint8)
            part = (left, top, wide, high)
            row_copies.crop_image(pixels, part, to[:size], flip=bool(number % 2), scratch=None)
            found.append(to)
        np.testing.assert_array_equal(*found)
        assert not found[0][size].any()  # nothing behind the last pixel
