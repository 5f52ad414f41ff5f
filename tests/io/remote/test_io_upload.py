"""Slab folders sent to S3: there whole or not at all, and the same; errors are one line."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import botocore.session
import numpy as np
import pytest
from hsgd.io import convert_to_slabs, open_map, upload_slabs
from hsgd.io.remote import object_writer
from hsgd.io.remote.clients import s3_client

from hdf5_samples import collect, make_slabs
from hsgd.errors import DataError
from hsgd.tools.cli import main
from loaders import loader_of
from moto_server import MotoServer

SLABS = 4
URL = "s3://bucket/some/data"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_slabs(tmp_path_factory.mktemp("s3") / "data", 100, SLABS)


@pytest.fixture
def folder(original, tmp_path):
    """A copy, which a test may change."""
    return shutil.copytree(original, tmp_path / "data")


@pytest.fixture
def server(monkeypatch, credentials):
    with MotoServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        s3_client().client.create_bucket(Bucket="bucket")
        server.requests.clear()
        yield server


def stored():
    """Bytes by key of all that lies in the bucket."""
    client = s3_client().client
    found = client.list_objects_v2(Bucket="bucket").get("Contents", [])
    return {
        each["Key"]: client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read()
        for each in found
    }


def expected(folder, prefix="some/data"):
    return {f"{prefix}/{path.name}": path.read_bytes() for path in Path(folder).glob("*.h5")}


@pytest.mark.parametrize("url", [URL, f"{URL}/", "s3://bucket"])
def test_what_was_sent_is_read_from_there(server, folder, url, tmp_path):
    done = upload_slabs(folder, url)
    assert (
        stored() == expected(folder, url.partition("bucket")[2].strip("/")) or url == "s3://bucket"
    )
    assert (done.sent, done.kept) == (SLABS + 1, 0)
    assert done.sent_bytes == sum(map(len, expected(folder).values()))
    for options in ({}, {"disk_cache": tmp_path / "cache"}, {"shuffle": "full", "verify": False}):
        loader = loader_of(url, 8, 0, 1, as_numpy=True, **{"verify": True, **options})
        assert sorted(collect(loader)["number"].tolist()) == list(range(100))


@pytest.mark.parametrize("shuffle", ["block", "slabs", "full", "none"])
def test_ranks_read_from_there_what_the_folder_has(server, folder, shuffle):
    upload_slabs(folder, URL)
    for rank in range(3):
        options = {"shuffle": shuffle, "seed": 3, "as_numpy": True, "block_bytes": 300}
        pairs = zip(
            loader_of(URL, 8, rank, 3, **options),
            loader_of(folder, 8, rank, 3, **options),
            strict=True,
        )
        for one, other in pairs:
            assert all(np.array_equal(one[name], other[name]) for name in other)


def test_an_object_that_is_replaced_is_an_error_and_never_a_sample(server, folder):
    upload_slabs(folder, URL)
    loader = loader_of(URL, 8, 0, 1, as_numpy=True)
    content = (folder / "slab-00002.h5").read_bytes()
    s3_client().client.put_object(
        Bucket="bucket", Key="some/data/slab-00002.h5", Body=content[:-1] + b"x"
    )
    with pytest.raises(DataError, match=r"slab-00002.h5: changed since it was opened"):
        list(loader)


def test_the_index_comes_last(server, folder):
    upload_slabs(folder, URL)
    keys = server.sent("PUT")
    assert len(keys) == SLABS + 1
    assert [key for key in keys if "index" in key] == keys[-1:]


def test_what_is_there_is_not_sent_again(server, folder):
    upload_slabs(folder, URL)
    server.requests.clear()
    done = upload_slabs(folder, URL)
    assert (done.sent, done.sent_bytes, done.kept) == (0, 0, SLABS + 1)
    assert not server.sent("PUT")


def test_what_is_missing_or_another_is_sent_again(server, folder):
    upload_slabs(folder, URL)
    client = s3_client().client
    client.delete_object(Bucket="bucket", Key="some/data/slab-00001.h5")
    size = (folder / "slab-00002.h5").stat().st_size
    client.put_object(Bucket="bucket", Key="some/data/slab-00002.h5", Body=bytes(size))
    assert upload_slabs(folder, URL).sent == 2
    assert stored() == expected(folder)


def test_an_upload_that_is_killed_goes_on(server, folder):
    command = [sys.executable, "-m", "hsgd", "data", "upload", str(folder), URL]
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.DEVNULL)
    server.wait_for("PUT", 3)
    process.kill()
    process.wait()
    assert "some/data/index.h5" not in stored()
    with pytest.raises(DataError, match="no slab folder"):
        open_map(URL)
    done = upload_slabs(folder, URL)
    assert done.kept >= 2
    assert stored() == expected(folder)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A folder of two slabs of 11 MB, of which parts are 5 MiB."""
    monkeypatch.setattr(object_writer, "_PART_BYTES", 5 << 20)
    values = np.random.default_rng(0).integers(0, 255, (22, 1 << 20), np.uint8)
    return convert_to_slabs({"x": values}, tmp_path / "large", num_slabs=2)[0]


def test_large_files_are_sent_in_parts(server, large):
    upload_slabs(large, URL)
    assert stored() == expected(large)
    assert len(server.sent("PUT")) == 2 * 3 + 1
    assert upload_slabs(large, URL).kept == 3


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_parts_that_fail_for_a_while_are_sent_again(server, large, status, code):
    server.fail("partNumber=2", status, code, times=3)
    upload_slabs(large, URL)
    assert stored() == expected(large)


@pytest.mark.long
def test_parts_that_were_left_a_day_ago_are_removed(server, large):
    server.begun -= datetime.timedelta(days=1)
    client = s3_client().client
    client.create_multipart_upload(Bucket="bucket", Key="some/data/slab-00000.h5")
    client.create_multipart_upload(Bucket="bucket", Key="some/data/slab-00000.h5-of-others")
    server.fail("PUT /bucket/some/data/slab-00001.h5", 403, "AccessDenied", times=1)
    with pytest.raises(DataError, match=r"sending part 1 failed .*AccessDenied"):
        upload_slabs(large, URL, threads=1)
    left = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    assert [each["Key"] for each in left] == ["some/data/slab-00000.h5-of-others"]


@pytest.mark.long
def test_two_may_send_the_same_at_once(server, large):
    """The second begins when the first has sent a part of a file, and ends before it."""
    begun, other_ended = threading.Event(), threading.Event()
    server.hold("partNumber=2", begun, other_ended)

    def send() -> None:
        upload_slabs(large, URL, threads=1)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(send)
        assert begun.wait(60)
        pool.submit(send).result(60)
        other_ended.set()
        first.result(60)
    assert stored() == expected(large)


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout"), (400, "BadDigest")],
)
def test_requests_that_fail_for_a_while_are_sent_again(server, folder, status, code):
    for method in ("HEAD", "PUT") if status >= 500 else ("PUT",):
        server.fail(f"{method} /bucket/some", status, code, times=2)
    upload_slabs(folder, URL)
    assert stored() == expected(folder)


def test_what_fails_for_long_is_an_error_that_names_it(server, folder):
    server.fail("PUT /bucket/some/data/slab-00002.h5", 503, "SlowDown", times=1000)
    pattern = rf"{URL}/slab-00002.h5: sending it failed \d+ times in .*SlowDown; .*--retry-s"
    with pytest.raises(DataError, match=pattern):
        upload_slabs(folder, URL, retry_s=0.3)
    assert "some/data/index.h5" not in stored()


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (403, "AccessDenied", "check the credentials: they need s3:PutObject"),
        (403, "SignatureDoesNotMatch", "check the credentials"),
        (403, "ExpiredToken", "check the credentials"),
        (404, "NoSuchBucket", "make the bucket"),
    ],
)
def test_what_will_not_get_better_is_not_sent_again(server, folder, status, code, text):
    server.fail("PUT /bucket/some/data/slab-00000.h5", status, code)
    with pytest.raises(DataError, match=rf"slab-00000.h5: sending it failed .*{code}.*; {text}"):
        upload_slabs(folder, URL, threads=1)
    assert server.sent("PUT").count("/bucket/some/data/slab-00000.h5") == 1


@pytest.mark.long
def test_without_credentials_an_error_says_so(server, folder, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(botocore.session.Session, "get_credentials", lambda _: None)
    server.fail("PUT /bucket", 403, "AccessDenied", times=10)
    with pytest.raises(DataError, match="there are no credentials here; set AWS_ACCESS_KEY_ID"):
        upload_slabs(folder, URL)


def test_who_may_only_write_can_send(server, folder):
    server.fail("HEAD", 403, "AccessDenied", times=100)
    with pytest.raises(DataError, match=r"may not see whether a dataset is there.*--overwrite"):
        upload_slabs(folder, URL)
    assert stored() == {}
    upload_slabs(folder, URL, overwrite=True)
    assert stored() == expected(folder)


def test_another_dataset_is_replaced_only_when_asked_for(server, folder, tmp_path):
    other = make_slabs(tmp_path / "other", 50, SLABS, seed=1)
    upload_slabs(other, URL)
    with pytest.raises(DataError, match=r"another dataset already; replace it with --overwrite"):
        upload_slabs(folder, URL)
    assert stored() == expected(other)
    server.requests.clear()
    upload_slabs(folder, URL, overwrite=True)
    assert stored() == expected(folder)
    assert server.sent("DELETE") == ["/bucket/some/data/index.h5"]


def test_a_smaller_dataset_leaves_nothing_of_a_larger_one(server, folder, tmp_path):
    upload_slabs(folder, URL)
    smaller = make_slabs(tmp_path / "smaller", 50, SLABS - 2, seed=1)
    upload_slabs(smaller, URL, overwrite=True)
    assert stored() == expected(smaller)


@pytest.mark.parametrize("before", ["slab-00001", "slab-00003", "index"])
def test_two_datasets_sent_to_one_place_at_once_are_an_error(
    server, folder, tmp_path, monkeypatch, before
):
    """All of the second is sent before one file of the first, which goes on then."""
    other = make_slabs(tmp_path / "other", 100, SLABS, seed=1)
    send, begun = object_writer.ObjectWriter.send, []

    def interrupted(writer, url, path, md5, advance):
        if before in path and not begun:
            begun.append(path)
            upload_slabs(other, URL, overwrite=True)
        return send(writer, url, path, md5, advance)

    monkeypatch.setattr(object_writer.ObjectWriter, "send", interrupted)
    with pytest.raises(DataError, match=r"slab-00000\.h5: . of . objects, .* replaced or removed"):
        upload_slabs(folder, URL, overwrite=True, threads=1)
    upload_slabs(folder, URL, overwrite=True)
    assert stored() == expected(folder)


def test_a_smaller_dataset_sent_meanwhile_is_an_error(server, folder, tmp_path, monkeypatch):
    smaller = make_slabs(tmp_path / "smaller", 50, SLABS - 2, seed=1)
    remove, begun = object_writer.ObjectWriter.remove, []

    def interrupted(writer, url):
        if "slab-0000" in url and not begun:
            begun.append(url)
            upload_slabs(folder, URL, overwrite=True)
        remove(writer, url)

    upload_slabs(folder, URL)
    monkeypatch.setattr(object_writer.ObjectWriter, "remove", interrupted)
    with pytest.raises(DataError, match=r"slab-00000\.h5: 3 of 3 objects, .* replaced or removed"):
        upload_slabs(smaller, URL, overwrite=True)


@pytest.mark.parametrize("status", [403, 404])
def test_what_is_removed_meanwhile_is_an_error(server, folder, monkeypatch, status):
    """Who may not list is told 403, of what is not there."""
    look = object_writer.ObjectWriter.find

    def find(writer, url, *, unseen_is_absent=True):
        if "00002" not in url:
            return look(writer, url, unseen_is_absent=unseen_is_absent)
        if status == 403 and not unseen_is_absent:
            raise object_writer.UnseenObject(url)
        return None

    monkeypatch.setattr(object_writer.ObjectWriter, "find", find)
    with pytest.raises(DataError, match=r"slab-00002\.h5: 1 of 4 objects, .* replaced or removed"):
        upload_slabs(folder, URL)
    assert "some/data/index.h5" not in stored()


def test_a_store_that_tells_no_md5_is_believed_by_its_etag(server, folder, monkeypatch):
    find = object_writer.ObjectWriter.find

    def encrypted(self, url, **how):
        found = find(self, url, **how)
        return found and replace(found, md5="of other bytes")

    monkeypatch.setattr(object_writer.ObjectWriter, "find", encrypted)
    upload_slabs(folder, URL)
    assert stored() == expected(folder)


def test_a_file_that_changes_meanwhile_is_never_whole(server, folder, monkeypatch):
    send = object_writer.ObjectWriter.send

    def change(writer, url, path, md5, advance):
        if "00001" in path:
            Path(path).write_bytes(b"another")
        return send(writer, url, path, md5, advance)

    monkeypatch.setattr(object_writer.ObjectWriter, "send", change)
    with pytest.raises(DataError, match=r"slab-00001.h5: changed while it was sent"):
        upload_slabs(folder, URL)
    assert "some/data/index.h5" not in stored()


@pytest.mark.parametrize("url", ["https://host/data", "bucket/data", "s3://bucket/data.h5"])
def test_only_places_in_s3_are_taken(folder, url):
    with pytest.raises(ValueError, match="not a place for a dataset; use s3://BUCKET/PREFIX"):
        upload_slabs(folder, url)


def test_what_is_no_slab_folder_is_not_sent(server, folder, tmp_path):
    (folder / "slab-00001.h5").unlink()
    with pytest.raises(DataError, match="slab 1 of 4 is missing"):
        upload_slabs(folder, URL)
    with pytest.raises(DataError, match="is not a slab folder; make one"):
        upload_slabs(tmp_path, URL)
    assert not server.requests


@pytest.mark.long
def test_the_commands_convert_and_send(server, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.arange(100))
    arguments = ["data", "convert", str(tmp_path / "x.npz"), str(tmp_path / "dst")]
    assert main([*arguments, "--to", URL]) == 0
    assert f"{URL}: 17 objects sent" in capsys.readouterr().out
    assert stored() == expected(tmp_path / "dst")
    assert main(["data", "upload", str(tmp_path / "dst"), URL]) == 0
    assert re.search(r"0 objects sent, 0 B; 17 were there", capsys.readouterr().out)


@pytest.mark.long
def test_both_parts_of_digits_are_sent(server, tmp_path):
    arguments = ["data", "convert", "digits", str(tmp_path / "dst"), "--quiet", "--slabs", "2"]
    assert main([*arguments, "--to", f"{URL}/"]) == 0
    for part in ("train", "test"):
        assert (
            open_map(f"{URL}/{part}").num_samples == open_map(tmp_path / "dst" / part).num_samples
        )


def test_the_commands_say_as_json_what_was_made_and_sent(server, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.arange(100))
    target = str(tmp_path / "dst")
    assert main(["data", "convert", str(tmp_path / "x.npz"), target, "--json", "--to", URL]) == 0
    found = json.loads(capsys.readouterr().out)
    (dataset,) = found["datasets"]
    assert dataset["path"] == target and dataset["samples"] == 100
    objects = len(expected(target))
    nbytes = sum(map(len, expected(target).values()))
    sent = {"path": target, "url": URL, "sent": objects, "sent_bytes": nbytes, "kept": 0}
    assert found["sent"] == [sent]
    assert main(["data", "upload", target, URL, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == {**sent, "sent": 0, "sent_bytes": 0, "kept": objects}


def test_what_cannot_be_sent_is_not_converted(server, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.arange(100))
    arguments = ["data", "convert", str(tmp_path / "x.npz"), str(tmp_path / "dst"), "--to"]
    assert main([*arguments, "s3://nothing/data"]) == 1
    assert "NoSuchBucket); make the bucket" in capsys.readouterr().err
    assert not (tmp_path / "dst").exists()
    assert main(["data", "convert", str(tmp_path / "x.npz"), URL]) == 1
    assert "DST is a folder; to send it there as well" in capsys.readouterr().err


def test_a_conversion_whose_upload_fails_says_how_to_go_on(server, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.arange(100))
    server.fail("PUT /bucket", 403, "AccessDenied", times=100)
    target = tmp_path / "dst"
    arguments = ["data", "convert", str(tmp_path / "x.npz"), str(target), "--quiet", "--to", URL]
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"go on with: hsgd data upload {target} {URL}")
    assert open_map(target).num_samples == 100
