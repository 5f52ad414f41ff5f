"""What hostile or broken servers answer costs no more than was asked for, and is never a sample."""

from __future__ import annotations

import gzip

import pytest
from hsgd.io.remote.objects import ObjectReader, RemoteAccess

from hdf5_samples import make_slabs
from hostile_server import HostileServer
from hsgd.cli import main
from hsgd.errors import DataError

__all__: list[str] = []

ONCE = RemoteAccess(retry_s=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A bucket with an object of 1,000 bytes, and a slab folder."""
    home = tmp_path_factory.mktemp("hostile")
    (home / "bucket").mkdir()
    make_slabs(home / "bucket" / "plain", 20, 2)
    (home / "bucket" / "object.h5").write_bytes(bytes(range(250)) * 4)
    return home


@pytest.fixture(params=["http", "s3"])
def url_of(request, monkeypatch):
    """The URL of an object of a server, by http or as one of S3."""
    names = {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "never-shown",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)

    def url(server, name="object.h5"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        return f"{server.url if request.param == 'http' else 's3:/'}/bucket/{name}"

    return url


def refusal(folder, misbehave, url_of, access=ONCE):
    """The one line of reading an object."""
    with HostileServer(folder, misbehave) as server:
        url = url_of(server)
        with pytest.raises(DataError) as caught:
            ObjectReader(access).open(url, 1000)
    text = str(caught.value)
    assert text.startswith(f"{url}: reading bytes [0, 1000) failed") and "\n" not in text
    return text


@pytest.mark.parametrize(
    "header",
    [
        *("Content-Encoding: gzip", "Content-Encoding: br", "Content-Encoding: GZIP"),
        *("Content-Encoding: identity, deflate", "Transfer-Encoding: gzip"),
        *("Transfer-Encoding: gzip, chunked", "Transfer-Encoding: chunked, chunked"),
    ],
)
def test_an_encoded_answer_is_refused(folder, url_of, header):
    def encoded(asked):
        body = gzip.compress(asked.body)
        body = body.ljust(len(asked.body), b"\0")[: len(asked.body)]
        yield asked.head(header)
        yield body

    assert f"(header {header})" in refusal(folder, encoded, url_of, RemoteAccess(retry_s=1e6))


@pytest.mark.parametrize("encoding", ["identity", ""])
def test_an_answer_that_says_it_is_not_encoded_is_taken(folder, url_of, encoding):
    def plain(asked):
        yield asked.head(f"Content-Encoding: {encoding}")
        yield asked.body

    with HostileServer(folder, plain) as server:
        _, body = ObjectReader(ONCE).open(url_of(server), 1000)
    assert body == (folder / "bucket" / "object.h5").read_bytes()


def test_an_encoded_index_is_one_line_of_the_command(folder, url_of, capsys):
    def encoded(asked):
        yield asked.head("Content-Encoding: gzip")
        yield asked.body

    with HostileServer(folder, encoded) as server:
        url = url_of(server, "plain")
        assert main(["data", "info", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{url}/index.h5" in line and "Content-Encoding: gzip" in line
