"""Encrypted connections, mutual ones too, against a gRPC server with certificates of a test authority."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.client.both import BOTH, WAYS, Make, call_once
from tests.client.fake_service import fake_service

from npugrad_client import Client, ConnectError, Tls, TlsError


class Identity:
    """An authority, and what it signed for a server on loopback and for a client."""

    def __init__(self) -> None:
        authority = trustme.CA()
        self.ca = authority.cert_pem.bytes()
        self.server = self._pair(authority.issue_cert("127.0.0.1", "localhost", "service.example.org"))
        self.certificate, self.key = self._pair(authority.issue_cert("client@example.org"))

    @staticmethod
    def _pair(leaf: trustme.LeafCert) -> tuple[bytes, bytes]:
        return b"".join(blob.bytes() for blob in leaf.cert_chain_pems), leaf.private_key_pem.bytes()

    def credentials(self, *, mutual: bool = False) -> grpc.ServerCredentials:
        certificate, key = self.server
        return grpc.ssl_server_credentials([(key, certificate)], self.ca if mutual else None, mutual)


@pytest.fixture(scope="module")
def own() -> Identity:
    return Identity()


@pytest.fixture(scope="module")
def other() -> Identity:
    return Identity()


@pytest.fixture
def service(own: Identity) -> Iterator[str]:
    with fake_service(credentials=own.credentials()) as seen:
        yield seen.address


@pytest.fixture
def mutual_service(own: Identity) -> Iterator[str]:
    with fake_service(credentials=own.credentials(mutual=True)) as seen:
        yield seen.address


def call(address: str, tls: Tls | bool | None) -> Any:
    return call_once(Client, address, tls=tls)


@WAYS
@BOTH
def test_who_trusts_the_server_and_is_trusted_is_answered(
    own: Identity, other: Identity, service: str, mutual_service: str, make: Make, way: int
) -> None:
    mutual = Tls(ca=own.ca, certificate=own.certificate, key=own.key)
    for address, tls in ((service, Tls(ca=own.ca)), (mutual_service, mutual)):
        assert call_once(make, address, tls=tls, stream_from_bytes=way).info.device == "test:0"
    unknown = Tls(ca=own.ca, certificate=other.certificate, key=other.key)
    for tls in (Tls(ca=own.ca), unknown):
        with pytest.raises(ConnectError, match=mutual_service):
            call_once(make, mutual_service, tls=tls, stream_from_bytes=way)


def test_files_do_as_well_as_bytes(own: Identity, mutual_service: str, tmp_path: Path) -> None:
    for name in ("ca", "certificate", "key"):
        (tmp_path / name).write_bytes(getattr(own, name))
    tls = Tls(ca=str(tmp_path / "ca"), certificate=tmp_path / "certificate", key=tmp_path / "key")
    assert call(mutual_service, tls).info.device == "test:0"


@pytest.mark.parametrize("tls", ["other", True], ids=["another authority", "the system's"])
def test_a_server_that_is_not_trusted_is_an_error_that_no_retry_changes(
    other: Identity, service: str, tls: Any
) -> None:
    with pytest.raises(TlsError, match=f"no encrypted connection to {service}: ") as caught:
        call(service, Tls(ca=other.ca) if tls == "other" else tls)
    assert not caught.value.retryable
    assert caught.value.tries == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (TlsError, str(caught.value))


def test_a_name_may_be_told_where_the_address_is_another_and_must_be_the_certificates(
    own: Identity, service: str
) -> None:
    assert call(service, Tls(ca=own.ca, server_name="service.example.org")).info.device == "test:0"
    with pytest.raises(TlsError, match=r"Hostname Verification Check failed|not in peer certificate"):
        call(service, Tls(ca=own.ca, server_name="elsewhere.example.org"))


def test_a_plain_end_of_an_encrypted_connection_is_an_error(own: Identity, service: str) -> None:
    with fake_service() as seen, pytest.raises(TlsError, match=f"no encrypted connection to {seen.address}"):
        call(seen.address, Tls(ca=own.ca))
    with pytest.raises(ConnectError, match=f"cannot reach {service}"):
        call(service, None)


def test_what_is_no_pem_or_half_of_a_pair_is_refused_at_once_by_name(tmp_path: Path) -> None:
    for half in ("certificate", "key"):
        with pytest.raises(ValueError, match=f"tls: a {half} needs a "):
            Tls(**{half: b"-----BEGIN X"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tls: ca: no PEM block"):
        Client("localhost:1", tls=Tls(ca=b"nonsense"))
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(ValueError, match=r"tls: ca: no PEM block .* in .*x"):
        Client("localhost:1", tls=Tls(ca=tmp_path / "x"))
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=Tls(ca=tmp_path / "y"))
    with pytest.raises(TypeError, match="tls: found str; expected Tls, True or None"):
        Client("localhost:1", tls="ca.pem")  # type: ignore[arg-type]


def test_no_key_is_ever_shown() -> None:
    assert repr(Tls(ca=b"-----BEGIN A", certificate=b"-----BEGIN B", key=b"-----BEGIN C")) == (
        "Tls(ca=..., certificate=..., key=..., server_name=None)"
    )
