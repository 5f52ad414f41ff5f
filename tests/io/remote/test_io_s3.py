"""Datasets in S3: the client's own variables lead to a server; what it answers becomes one line."""

from __future__ import annotations

import shutil

import pytest
from hsgd.io import PartitionedLoader, ReadOptions, open_map

from hdf5_samples import collect, make_slabs
from hsgd.errors import DataError
from toolkit.range_server import RangeServer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_slabs(tmp_path_factory.mktemp("s3") / "data", 100, 4)


@pytest.fixture
def bucket(original, tmp_path, monkeypatch, credentials):
    """A server of the bucket `bucket`, with the folder as s3://bucket/some/data."""
    shutil.copytree(original, tmp_path / "bucket" / "some" / "data")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with RangeServer(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def make(**options):
    return PartitionedLoader(
        "s3://bucket/some/data",
        8,
        rank=0,
        world_size=1,
        as_numpy=True,
        read=ReadOptions(**{"retry_s": 30, **options}),
    )


@pytest.mark.parametrize("kind", [None, 500, 503, "cut", "dropped"])
def test_an_epoch_has_each_sample_once(bucket, kind):
    loader = make(verify=True)
    if kind is not None:
        bucket.fail(kind, 3)
    assert sorted(collect(loader)["number"].tolist()) == list(range(100))
    assert loader.metrics()["retries"] == (0 if kind is None else 3)
    assert all(request.name.startswith("bucket/some/data/") for request in bucket.requests)


def test_an_object_that_changes_is_an_error(bucket):
    loader = make()
    (bucket.folder / "bucket/some/data/slab-00002.h5").touch()
    with pytest.raises(DataError, match=r"s3://bucket/some/data/slab-00002.h5: changed since"):
        list(loader)


def test_refusals_show_no_credentials(bucket, monkeypatch):
    bucket.fail(403)
    with pytest.raises(DataError, match="status 403; check the credentials") as caught:
        make()
    assert "never-shown" not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bucket.fail(403)
    with pytest.raises(DataError, match="there are no credentials here; set AWS_ACCESS_KEY_ID"):
        make()


def test_public_buckets_need_no_credentials(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert open_map("s3://bucket/some/data").num_samples == 100


def test_a_bucket_without_the_folder_is_named(bucket):
    with pytest.raises(DataError, match=r"s3://bucket/other: no slab folder, index.h5 is missing"):
        open_map("s3://bucket/other")


def test_a_server_that_is_gone_is_an_error(bucket):
    loader = make(retry_s=0.2)
    bucket.stop()
    with pytest.raises(DataError, match=r"s3://bucket/some/data/slab-.*reading bytes .*retry_s"):
        list(loader)
