"""Datasets by https: certificates and redirects that are not safe are refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hsgd.io import open_map
from hsgd.io.remote import clients
from hsgd.io.remote.object_reader import RemoteAccess

from hdf5_samples import make_slabs
from hsgd.errors import DataError
from toolkit.range_server import RangeServer

__all__: list[str] = []


CERTIFICATE = Path(__file__).with_name("loopback.pem")  # only those trust it who are told to


@pytest.fixture
def server(tmp_path):
    make_slabs(tmp_path / "plain", 20, 2)
    with RangeServer(tmp_path, certificate=CERTIFICATE) as server:
        yield server


@pytest.fixture
def trusted(monkeypatch):
    """A client that trusts the server."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    monkeypatch.setattr(clients._clients, "made", {})


def test_an_untrusted_certificate_is_one_line_after_one_try(server, monkeypatch):
    monkeypatch.setattr(clients._clients, "made", {})
    with pytest.raises(
        DataError, match=r"certificate of the server is refused.*SSL_CERT_FILE"
    ) as e:
        open_map(f"{server.url}/plain", access=RemoteAccess(retry_s=1e6))  # ends, or times out
    assert "\n" not in str(e.value)
    assert server.requests == []


def test_an_untrusted_certificate_of_s3_is_one_line_after_one_try(server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "tests")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with pytest.raises(DataError, match=r"certificate of the server is refused.*AWS_CA_BUNDLE"):
        open_map("s3://plain/data", access=RemoteAccess(retry_s=1e6))
    assert server.requests == []


def test_a_trusted_certificate_is_read(server, trusted):
    assert open_map(f"{server.url}/plain").num_samples == 20


def test_a_redirect_that_leaves_https_is_refused_without_its_query(server, trusted, tmp_path):
    with RangeServer(tmp_path) as plain:
        place = f"{plain.url}/plain/index.h5"
        server.fail(302, location=f"{place}?signature=secret")
        with pytest.raises(DataError, match=rf"redirects from https to {place}, which") as caught:
            open_map(f"{server.url}/plain")
        assert plain.requests == []
    assert "secret" not in str(caught.value)


def test_redirects_inside_https_and_from_http_are_followed(server, trusted, tmp_path):
    server.fail(302, location="/plain/index.h5")
    assert open_map(f"{server.url}/plain").num_samples == 20
    with RangeServer(tmp_path) as plain:
        plain.fail(307, location=f"{server.url}/plain/index.h5")
        assert open_map(f"{plain.url}/plain").num_samples == 20


def test_redirects_without_end_are_an_error(server, trusted):
    server.fail(302, 1000, location="/plain/index.h5")
    with pytest.raises(DataError, match="more than 5 redirects; check the URL"):
        open_map(f"{server.url}/plain")
