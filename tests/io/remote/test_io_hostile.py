"""What hostile or broken servers answer costs no more than was asked for, and is never a sample."""

from __future__ import annotations

import gzip
import itertools
import resource

import pytest
from hsgd.io.remote import object_reader
from hsgd.io.remote.object_reader import ObjectReader, RemoteAccess

from hdf5_samples import make_slabs
from hostile_server import HostileServer, dripping
from hsgd.errors import DataError
from hsgd.tools.cli import main

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


@pytest.fixture
def impatient(monkeypatch):
    """What an answer may take at least is short."""
    monkeypatch.setattr(object_reader, "_LEAST_ANSWER_S", 0.2)


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


def slow_status(asked):
    yield from dripping(b"H")


def slow_header(asked):
    yield asked.head()[:-2]
    yield from dripping(b"X")


def endless_go_on(asked):
    yield from dripping(b"HTTP/1.1 100 Continue\r\n\r\n")


def slow_body(asked):
    yield asked.head()
    yield from dripping(asked.body)


def slow_chunks(asked):
    yield asked.head("Transfer-Encoding: chunked", length=False)
    yield from dripping(b"1;and-a-long-word\r\n\0\r\n")


def slow_end(asked):
    yield asked.head("Transfer-Encoding: chunked", length=False)
    yield b"%x\r\n%b\r\n0" % (len(asked.body), asked.body)
    yield from dripping(b"0")


def slow_refusal(asked):
    yield asked.head("Content-Length: 1000000", status="404 Not Found")
    yield from dripping(b"x")


@pytest.mark.timeout(60)  # none of them ends
@pytest.mark.parametrize(
    "misbehave", [slow_status, slow_header, endless_go_on, slow_body, slow_chunks, slow_end]
)
def test_an_answer_that_drips_is_given_up_in_the_time_given(folder, url_of, impatient, misbehave):
    assert "the answer came too slowly" in refusal(folder, misbehave, url_of)


@pytest.mark.timeout(60)
def test_the_words_of_a_refusal_are_not_waited_for(folder, url_of, impatient):
    with HostileServer(folder, slow_refusal) as server, pytest.raises(DataError):
        ObjectReader(ONCE).open(url_of(server), 1000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", [dripping(b"x"), itertools.repeat(bytes(1 << 20))])
def test_the_body_of_a_redirect_is_not_read(folder, body):
    def elsewhere(asked):
        lines = (f"Location: {right.url}/bucket/object.h5", f"Content-Length: {1 << 60}")
        yield asked.head(*lines, status="302 Found")
        yield from body

    right = HostileServer(folder, slow_body, times=0)
    with right, HostileServer(folder, elsewhere) as server:
        _, found = ObjectReader(ONCE).open(f"{server.url}/bucket/object.h5", 1000)
    assert found == (folder / "bucket" / "object.h5").read_bytes()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["http://[bad/", "http://a:99999999/", "http://", "ftp://a/", ""])
def test_a_redirect_to_nowhere_is_refused(folder, place):
    def nowhere(asked):
        yield asked.head(f"Location: {place}", "Content-Length: 0", status="302 Found")

    with HostileServer(folder, nowhere) as server, pytest.raises(DataError, match="failed"):
        ObjectReader(ONCE).open(f"{server.url}/bucket/object.h5", 1000)


def test_a_body_without_end_takes_no_memory(folder, url_of):
    """S3's client reads what a server says to an error."""

    def endless(asked):
        yield asked.head(status="500 Oops", length=False)
        yield from itertools.repeat(bytes(1 << 20), 1024)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(folder, endless, url_of)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (200 << 10)


def chunks_without_last(asked):
    yield asked.head("Transfer-Encoding: chunked", length=False)
    yield b"%x\r\n%b\r\n" % (len(asked.body), asked.body)


def chunks_with_a_bad_last(asked):
    yield from chunks_without_last(asked)
    yield b"no number\r\n\r\n"


def chunks_with_a_negative_last(asked):
    yield from chunks_without_last(asked)
    yield b"-5\r\n\r\n"


def negative_chunk(asked):
    yield asked.head("Transfer-Encoding: chunked", length=False)
    yield b"-%x\r\n%b\r\n0\r\n\r\n" % (len(asked.body), asked.body)


def chunks_that_stop(asked):
    yield from chunks_without_last(asked)
    yield from itertools.repeat(b"")


def length_of_many_digits(asked):
    yield asked.head(f"Content-Length: {'9' * 5000}")
    yield asked.body


BROKEN = [
    chunks_without_last,
    chunks_with_a_bad_last,
    chunks_with_a_negative_last,
    negative_chunk,
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("misbehave", BROKEN)
def test_a_broken_end_is_asked_for_again(folder, url_of, impatient, misbehave):
    with HostileServer(folder, misbehave, times=1) as server:
        _, body = ObjectReader(RemoteAccess(retry_s=5)).open(url_of(server), 1000)
        assert server.asked == 2
    assert body == (folder / "bucket" / "object.h5").read_bytes()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("misbehave", [*BROKEN, chunks_that_stop])
def test_an_end_that_stays_broken_is_an_error(folder, url_of, impatient, misbehave):
    assert "failed once, at last: " in refusal(folder, misbehave, url_of)


def test_a_length_of_many_digits_is_no_bare_error(folder):
    with HostileServer(folder, length_of_many_digits) as server:
        _, body = ObjectReader(ONCE).open(f"{server.url}/bucket/object.h5", 1000)
    assert body == (folder / "bucket" / "object.h5").read_bytes()


@pytest.mark.parametrize(
    "text", [f"bytes 0-{'9' * 5000}/{'9' * 5000}", "bytes 0-999/*", "bytes 9-0", "bytes\xb2 0-1/2"]
)
def test_a_range_that_is_none_is_refused(folder, url_of, text):
    def odd(asked):
        yield asked.head(f"Content-Range: {text}")
        yield asked.body

    found = refusal(folder, odd, url_of)
    assert "(header Content-Range: bytes" in found and len(found) < 400
