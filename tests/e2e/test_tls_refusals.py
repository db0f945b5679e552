"""What a person reads whose connection does not come about: our client against our server, both ways."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import trustme
from tests.client.fake_service import fake_service
from tests.fix_server import ServerProcess, run_server
from tests.fix_tls import Certificates

from npugrad_client import AsyncClient, Client, ConnectError, RetryPolicy, Tls, TlsError

_PAST: dict[str, Any] = {
    "not_before": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    "not_after": datetime.datetime(2021, 1, 1, tzinfo=datetime.timezone.utc),
}
_WANTS_ANOTHER = "as a server does if it requires a client certificate, or one from another authority (gRPC: "


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server that asks for certificates."""
    credentials = certificates.credentials(certificates.caller())
    log_path = tmp_path_factory.mktemp("mutual") / "server.log"
    with run_server(
        log_path, *certificates.mutual_flags, devices="test:1", credentials=credentials
    ) as running:
        yield running


def read(address: str, tls: Tls | None) -> list[ConnectError]:
    """How both clients fail; neither takes long over it."""

    async def work() -> None:
        async with AsyncClient(address, tls=tls) as client:
            await client.server_info()

    started, found = time.monotonic(), []
    with Client(address, tls=tls) as client, pytest.raises(ConnectError) as caught:
        client.server_info()
    found.append(caught.value)
    with pytest.raises(ConnectError) as caught:
        asyncio.run(asyncio.wait_for(work(), 30))
    found.append(caught.value)
    assert time.monotonic() - started < 25
    return found


def refusal(address: str, tls: Tls | None, text: str) -> None:
    """Not a TLS error, because nothing tells that it is one; retried for fractions of a second."""
    for error in read(address, tls):
        assert str(error).startswith(f"server_info: cannot reach {address}: it closed the connection, {text}")
        assert error.tries <= RetryPolicy().max_tries, "taken for a server that is lost"


def failure(address: str, tls: Tls, text: str) -> None:
    """An error that no retry changes."""
    for error in read(address, tls):
        assert isinstance(error, TlsError)
        assert error.tries == 1
        assert str(error).startswith(f"server_info: no encrypted connection to {address}: {text} (gRPC: ")


def test_a_client_without_the_right_certificate_reads_why(
    mutual: ServerProcess, certificates: Certificates
) -> None:
    ca = certificates.authority
    key, certificate = certificates.caller(trusted=False)
    refusal(mutual.address, Tls(ca=ca), _WANTS_ANOTHER)
    refusal(mutual.address, Tls(ca=ca, certificate=certificate, key=key), _WANTS_ANOTHER)


def test_a_plain_client_reads_that_the_server_is_encrypted(mutual: ServerProcess) -> None:
    refusal(mutual.address, None, "as a server does if it only speaks TLS (gRPC: ")


def test_an_encrypted_client_reads_that_the_server_is_plain(
    server: ServerProcess, certificates: Certificates
) -> None:
    failure(server.address, Tls(ca=certificates.authority), "the server does not speak TLS")


def test_a_client_that_trusts_another_authority_reads_it(
    mutual: ServerProcess, certificates: Certificates
) -> None:
    said = "the server's certificate is signed by an authority that is not trusted; name it with Tls(ca=...)"
    failure(mutual.address, Tls(ca=certificates.client_ca), said)


def test_a_client_that_expects_another_name_reads_it(
    mutual: ServerProcess, certificates: Certificates
) -> None:
    key, certificate = certificates.caller()
    tls = Tls(
        ca=certificates.authority, certificate=certificate, key=key, server_name="elsewhere.example.org"
    )
    said = "the server's certificate is for another name than the target; set it with Tls(server_name=...)"
    failure(mutual.address, tls, said)


@pytest.mark.parametrize("wrong", ["ca", "key"])
def test_a_client_with_files_that_do_not_fit_reads_it(
    mutual: ServerProcess, certificates: Certificates, wrong: str
) -> None:
    (key, certificate), (other, _) = certificates.caller(), certificates.caller()
    parts: dict[str, Any] = {"ca": certificates.authority, "certificate": certificate, "key": key}
    parts[wrong] = (
        other if wrong == "key" else b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"
    )
    said = "ca, certificate or key cannot be used, or the key belongs to another certificate"
    failure(mutual.address, Tls(**parts), said)


def test_a_client_reads_that_the_servers_certificate_has_expired() -> None:
    """That of a server of another kind: ours does not start with one."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", **_PAST)
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    with fake_service(credentials=grpc.ssl_server_credentials([pair])) as seen:
        failure(seen.address, Tls(ca=authority.cert_pem.bytes()), "the server's certificate has expired")
