"""Datasets behind URLs: the samples of the folder, whatever the server does, or an error."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import urllib.request

import h5py
import numpy as np
import pytest
from hsgd.io import PartitionedDataset, class_names, open_map
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.remote.clients import client_for
from hsgd.io.remote.limited_answers import Limits
from torch.utils.data import DataLoader

from hdf5_samples import arrays_of, collect, make_ragged_slabs, make_slabs, write_hdf5
from hsgd.errors import DataError
from hsgd.tools.cli import main
from loaders import loader_of
from toolkit.range_server import RangeServer

TINY = {"block_bytes": 300, "window_bytes": 900, "retry_s": 30}
RAGGED = 60


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Folders of all kinds, each with a few samples."""
    home = tmp_path_factory.mktemp("remote")
    make_slabs(home / "plain", 100, 5)
    make_slabs(home / "gzip", 100, 3, compress="gzip")
    make_ragged_slabs(home / "ragged", RAGGED, 3)
    write_hdf5(home / "user.h5", arrays_of(50), chunks=True)
    write_hdf5(home / "swapped.h5", {"x": np.arange(50, dtype=">i4")})
    return home


def same_batches(one, other):
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name, values in left.items():
            for part in ("values", "offsets") if hasattr(values, "offsets") else ("__array__",):
                found, wanted = (getattr(block, part) for block in (values, right[name]))
                if part == "__array__":
                    found, wanted = found(), wanted()
                np.testing.assert_array_equal(found, wanted)


def make(path, rank=0, world_size=1, batch_size=8, **options):
    settings = {"seed": 3, "as_numpy": True, **TINY, **options}
    return loader_of(path, batch_size, rank, world_size, **settings)


@pytest.mark.parametrize("shuffle", ["block", "slabs", "full", "none"])
@pytest.mark.parametrize("name", ["plain", "gzip", "ragged", "user.h5", "swapped.h5"])
def test_batches_are_those_of_the_folder(server, home, name, shuffle):
    for rank in range(3):
        options = {"rank": rank, "world_size": 3, "shuffle": shuffle}
        same_batches(make(f"{server.url}/{name}", **options), make(home / name, **options))


@pytest.mark.parametrize("name", ["plain", "gzip", "ragged"])
def test_checked_batches_are_those_of_the_folder(server, home, name):
    same_batches(make(f"{server.url}/{name}/", verify=True), make(home / name, verify=True))


def test_windows_of_tokens_are_those_of_the_folder(server, home):
    options = {"pack": 7, "fields": ["tokens"], "batch_size": 4}
    same_batches(make(f"{server.url}/ragged", **options), make(home / "ragged", **options))


def test_a_job_goes_on_behind_a_url_where_it_stopped_in_the_folder(server, home):
    loader = make(home / "plain")
    batches = iter(loader)
    seen = [next(batches) for _ in range(4)]
    resumed = make(f"{server.url}/plain")
    resumed.load_state_dict(loader.state_dict())
    same_batches([*seen, *resumed], make(home / "plain"))


def test_processes_that_were_forked_read_on(server):
    dataset = PartitionedDataset(f"{server.url}/plain", 10, rank=0, world_size=1)
    collect(dataset)  # connections are open here
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(collect(batches)["number"].tolist()) == list(range(100))


def test_a_loader_goes_to_another_process_by_pickle(server, home):
    loader = pickle.loads(pickle.dumps(make(f"{server.url}/plain")))
    same_batches(loader, make(home / "plain"))


def test_metadata_is_fetched_once_and_each_block_is_one_request(server, home):
    slabs = open_map(home / "plain").slabs
    loader = make(f"{server.url}/plain", fields=["image"], shuffle="none", batch_size=1)
    opened = len(server.requests)
    assert opened == 1 + len(slabs)  # the index, and each slab: all of it is near its beginning
    assert sum(len(batch["image"]) for batch in loader) == 100
    extents = [slab.extents["image"].offset for slab in slabs]
    read = sorted(
        (request.name, request.start, request.stop) for request in server.requests[opened:]
    )
    block = 12 * 24  # 300 bytes hold 7 samples of all fields, 12 of this one
    wanted = [
        (f"plain/slab-{number:05d}.h5", start + low, min(start + low + block, start + 20 * 24))
        for number, start in enumerate(extents)
        for low in range(0, 20 * 24, block)
    ]
    covered = {name: sum(stop - start for n, start, stop in read if n == name) for name, *_ in read}
    assert covered == dict.fromkeys(sorted({name for name, *_ in wanted}), 20 * 24)
    assert len(read) <= len(wanted) + 2  # the first batch comes alone
    assert loader.metrics()["requests"] == len(read)
    assert loader.metrics()["bypass"] == {"image": "range requests"}


@pytest.mark.parametrize("kind", [500, 503, 429, 408, "cut", "dropped"])
def test_what_fails_for_a_while_is_asked_for_again(server, home, kind):
    loader = make(f"{server.url}/plain")
    server.fail(kind, 3)
    same_batches(loader, make(home / "plain"))
    assert loader.metrics()["retries"] == 3


def test_a_range_that_broke_off_goes_on_with_the_byte_that_is_missing(server, home):
    loader = make(f"{server.url}/plain", fields=["image"], shuffle="none", threads=1)
    server.requests.clear()
    server.fail("cut", 2)
    same_batches(loader, make(home / "plain", fields=["image"], shuffle="none"))
    first, second, third = server.requests[:3]
    half = first.start + (first.stop - first.start) // 2
    assert (second.start, second.stop) == (half, first.stop)
    assert (third.start, third.stop) == (half + (first.stop - half) // 2, first.stop)


def test_a_range_never_goes_on_with_bytes_of_another_version(server, home):
    loader = make(f"{server.url}/plain", fields=["image"], shuffle="none", threads=1)
    path, take_fault = home / "plain" / "slab-00000.h5", server.take_fault

    def cut_and_change(name):
        fault = take_fault(name)
        if fault is None:
            path.touch()
        return fault

    server.take_fault = cut_and_change
    server.fail("cut")
    with pytest.raises(DataError, match=r"slab-00000.h5: changed since it was opened"):
        list(loader)


def test_opening_asks_again_too(server, home):
    for kind in (500, "cut", "dropped"):
        server.fail(kind)
    same_batches(make(f"{server.url}/ragged"), make(home / "ragged"))


def test_a_server_that_asks_to_wait_is_asked_later(server, home):
    loader = make(f"{server.url}/plain", retry_s=0.5)
    server.fail(429, name="slab-00002", retry_after="3600")
    with pytest.raises(DataError, match=r"slab-00002.h5: reading bytes .*status 429.*retry_s"):
        list(loader)


@pytest.mark.parametrize(
    ("status", "text"), [(403, "check the credentials"), (404, "check the URL")]
)
def test_what_will_not_get_better_is_not_asked_for_again(server, status, text):
    loader = make(f"{server.url}/plain")
    server.fail(status, 1000, name="slab-00003")
    with pytest.raises(DataError, match=rf"slab-00003.h5: .*status {status}.*; {text}"):
        list(loader)
    assert loader.metrics()["retries"] == 0


def test_a_server_that_is_gone_is_an_error_that_names_it(server):
    loader = make(f"{server.url}/plain", retry_s=0.2)
    server.stop()
    with pytest.raises(DataError, match=rf"{server.url}/plain/slab-.*reading bytes .* retry_s"):
        list(loader)
    with pytest.raises(DataError, match=r"index\.h5: reading bytes"):
        make(f"{server.url}/plain", retry_s=0.2)


def test_a_loader_that_is_closed_stops_asking(server):
    loader = make(f"{server.url}/plain", retry_s=10_000)
    server.fail(503, 1_000_000)
    iter(loader)
    loader.close()  # returns, or the test times out
    assert loader.metrics()["batches"] == 0


@pytest.mark.parametrize("checks_etag", [True, False])
def test_an_object_that_changes_is_an_error_and_never_a_sample(home, checks_etag):
    with RangeServer(home, checks_etag=checks_etag) as server:
        loader = make(f"{server.url}/plain", shuffle="none", batch_size=20)
        batches = iter(loader)
        next(batches)
        loader.close()
        path = home / "plain" / "slab-00004.h5"
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        before = f"{status.st_mtime_ns:x}-{status.st_size:x}"
        with pytest.raises(DataError, match=rf"slab-00004.h5: changed since.*{before}.*open the"):
            list(loader)


def test_an_object_that_was_cut_off_is_an_error(server, home):
    loader = make(f"{server.url}/plain")
    os.truncate(home / "plain" / "slab-00001.h5", 5000)
    with pytest.raises(DataError, match=r"slab-00001\.h5: changed since"):
        list(loader)
    with pytest.raises(DataError, match=r"slab-00001\.h5: truncated"):
        make(f"{server.url}/plain")


def test_wrong_bytes_are_found_by_their_checksum(server, home):
    slab = open_map(home / "plain").slabs[2]
    with open(slab.path, "r+b") as file:
        file.seek(slab.extents["image"].offset + 30)
        file.write(b"\xff")
    with pytest.raises(DataError, match=rf"{server.url}.*slab-00002.h5: the checksum.*'image'"):
        list(make(f"{server.url}/plain", verify=True))
    (line,) = find_damage(open_map(f"{server.url}/plain"))
    assert "slab-00002.h5: the checksum" in line


def test_damaged_offsets_are_found_by_their_checksum(server, home):
    slab = open_map(home / "ragged").slabs[1]
    with open(slab.path, "r+b") as file:
        file.seek(slab.extents["tokens"].offsets.offset + 8)
        file.write(b"\x01")
    (line,) = find_damage(open_map(f"{server.url}/ragged"))
    assert "slab-00001.h5: the checksum of the offsets" in line


def test_batches_that_cannot_be_had_are_skipped(server):
    loader = make(f"{server.url}/plain", shuffle="none", batch_size=10, on_error="skip")
    server.fail(403, 1000, name="slab-00001")
    with pytest.warns(UserWarning, match=r"2 of 10 batches .*slab-00001\.h5.*status 403"):
        found = collect(loader)["number"]
    assert len(found) == 80


def test_a_server_without_ranges_is_refused(server):
    server.fail("whole")
    with pytest.raises(DataError, match=r"index\.h5: .*this server sends whole files only"):
        make(f"{server.url}/plain")


def test_what_is_missing_is_named(server, home):
    with pytest.raises(DataError, match=r"/nothing: no slab folder, index\.h5 is missing"):
        make(f"{server.url}/nothing")
    with pytest.raises(DataError, match=r"/nothing\.h5: no such object"):
        make(f"{server.url}/nothing.h5")
    (home / "plain" / "slab-00003.h5").unlink()
    with pytest.raises(DataError, match=r"slab-00003\.h5: slab 3 of 5 is missing"):
        make(f"{server.url}/plain")


def test_what_is_no_hdf5_file_is_refused(server, home):
    (home / "text.h5").write_text("no HDF5 file" * 100)
    (home / "empty.h5").write_text("")
    with pytest.raises(DataError, match=r"text\.h5: not an HDF5 file"):
        make(f"{server.url}/text.h5")
    with pytest.raises(DataError, match=r"empty\.h5: .*status 416"):
        make(f"{server.url}/empty.h5")


def test_links_to_other_files_are_not_followed(server, home):
    with h5py.File(home / "user.h5", "r+") as file:
        file["elsewhere"] = h5py.ExternalLink("swapped.h5", "x")
    with pytest.warns(UserWarning, match=r"'elsewhere'.*not followed from a URL"):
        found = make(f"{server.url}/user.h5")
    assert "elsewhere" not in {spec.name for spec in found.fields}


def test_what_only_hdf5_can_read_is_refused(server, home):
    with h5py.File(home / "scaled.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), scaleoffset=8)
    with pytest.raises(DataError, match=r"scaled\.h5: field 'x': .*which only h5py reads"):
        make(f"{server.url}/scaled.h5")


def test_urls_cannot_be_mapped(server):
    with pytest.raises(ValueError, match=r"mapped=True: http.*is no file"):
        make(f"{server.url}/plain", shuffle="none", mapped=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://user:secret@host/data", "user, a query or a signature"),
        ("https://host/data?X-Amz-Signature=secret", "user, a query or a signature"),
        ("ftp://user:secret@host/data", "unknown scheme 'ftp'"),
        ("https:///data", "no host"),
        ("http://host:port/data", "no valid port"),
    ],
)
def test_urls_that_cannot_be_read_are_refused_without_their_secrets(url, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        open_map(url)
    assert "secret" not in str(caught.value)


def test_commands_take_urls(server, capsys):
    assert main(["data", "info", f"{server.url}/plain"]) == 0
    assert "range requests" in capsys.readouterr().out
    assert main(["data", "verify", f"{server.url}/plain", "--quiet"]) == 0
    assert "all checksums right" in capsys.readouterr().out
    assert class_names(f"{server.url}/plain", "number") == []


def test_packages_that_are_missing_are_named():
    code = (
        "import sys; sys.modules['urllib3'] = None; from hsgd.io import open_map; "
        "open_map('{}://host/data')"
    )
    for scheme, package in (("http", "urllib3"), ("s3", "botocore")):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(scheme)], capture_output=True, text=True, check=False
        )
        assert f"pip install {package}" in ended.stderr.strip().splitlines()[-1]


def test_the_server_knows_ranges_without_an_end(server, home):
    """As clients of S3 ask for the end of an object."""
    content = (home / "user.h5").read_bytes()
    wanted = urllib.request.Request(f"{server.url}/user.h5", headers={"Range": "bytes=100-"})
    with urllib.request.urlopen(wanted) as answer:
        assert (answer.status, answer.read()) == (206, content[100:])


def test_answers_in_chunks_leave_their_connection_usable(server, home):
    server.fail("chunked", times=20)
    content = (home / "user.h5").read_bytes()
    client = client_for(server.url)
    for start in range(0, 3000, 500):
        end, out = Limits(time.monotonic() + 60, 500), bytearray(500)
        answer = client.get(f"{server.url}/user.h5", start, start + 500, "", end)
        assert answer.read_into(memoryview(out)) == 500
        answer.finish(True)
        assert out == content[start : start + 500]
