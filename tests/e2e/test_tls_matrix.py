"""Wrong certificates, each over a real handshake: a server's to our client, a caller's to our server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tests.client.fake_service import fake_service
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, run_server
from tests.fix_tls import CLIENT_ONLY, SERVER_ONLY, Certificates, signed_again

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import AsyncClient, Client, ConnectError, Tls, TlsError

TIMEOUT_S = 30
AUTHORITY, OTHER = trustme.CA(), trustme.CA()
INTERMEDIATE = AUTHORITY.create_child_ca()
PAST, FUTURE = (datetime(year, 1, 1, tzinfo=timezone.utc) for year in (2021, 2100))


def issued(
    by: trustme.CA = AUTHORITY, name: str = "127.0.0.1", *, chain: int = 1, **changes: Any
) -> tuple[bytes, bytes]:
    """Key and certificates; with `changes`, signed again."""
    made = by.issue_cert(name)
    pem = made.cert_chain_pems[0].bytes()
    if changes:
        pem = signed_again(pem, by, **changes)
    rest = b"".join(one.bytes() for one in made.cert_chain_pems[1:chain])
    return made.private_key_pem.bytes(), pem + rest


COMMON: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "expired": lambda: issued(ends=PAST),
    "not yet valid": lambda: issued(starts=FUTURE, ends=FUTURE.replace(year=2101)),
    "wrong CA": lambda: issued(OTHER),
    "missing intermediate": lambda: issued(INTERMEDIATE),
}
SERVERS: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    **COMMON,
    "wrong usage": lambda: issued(usages=CLIENT_ONLY),
    "wrong host name": lambda: issued(name="elsewhere.example.org"),
}
CALLERS: dict[str, Callable[[], tuple[bytes | None, bytes | None]]] = {
    **COMMON,
    "wrong usage": lambda: issued(usages=SERVER_ONLY),
    "key of another": lambda: (issued()[0], issued()[1]),
    "no certificate": lambda: (None, None),
}
REASONS = {
    "expired": "certificate has expired",
    "not yet valid": "certificate is not yet valid",
    "wrong CA": "unable to get local issuer certificate",
    "missing intermediate": "unable to get local issuer certificate",
    "wrong usage": "unsupported certificate purpose",
    "no certificate": "PEER_DID_NOT_RETURN_A_CERTIFICATE",
}
"""What gRPC's own log says of a caller that is not let in; the key of another never gets as far."""
WITH_INTERMEDIATE = issued(INTERMEDIATE, chain=2)


def tls(pair: tuple[bytes | None, bytes | None] = (None, None), ca: bytes | str | None = None) -> Tls:
    return Tls(ca=ca or AUTHORITY.cert_pem.bytes(), key=pair[0], certificate=pair[1])


def errors(address: str, how: Tls) -> list[ConnectError]:
    """How both clients fail, synchronous and not."""

    async def work() -> None:
        async with AsyncClient(address, tls=how, timeout_s=TIMEOUT_S, retry=None) as client:
            await client.server_info()

    with (
        Client(address, tls=how, timeout_s=TIMEOUT_S, retry=None) as client,
        pytest.raises(ConnectError) as caught,
    ):
        client.server_info()
    with pytest.raises(ConnectError) as caught_too:
        asyncio.run(work())
    return [caught.value, caught_too.value]


@pytest.mark.parametrize("is_mutual", [False, True], ids=["server only", "mutual"])
@pytest.mark.parametrize("kind", SERVERS)
def test_a_client_talks_to_no_server_with_a_wrong_certificate(kind: str, is_mutual: bool) -> None:
    """Servers of another kind: ours does not start with most of these."""
    root = AUTHORITY.cert_pem.bytes()
    credentials = grpc.ssl_server_credentials([SERVERS[kind]()], root if is_mutual else None, is_mutual)
    with fake_service(credentials=credentials) as seen:
        for error in errors(seen.address, tls(issued() if is_mutual else (None, None))):
            assert isinstance(error, TlsError), error
    assert seen.methods == []


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """Our server, which trusts callers of the authority here."""
    folder = tmp_path_factory.mktemp("mutual")
    AUTHORITY.cert_pem.write_to_path(str(folder / "callers.pem"))
    flags = (*certificates.flags, "--tls-client-ca", str(folder / "callers.pem"))
    credentials = certificates.credentials(issued())
    with run_server(
        folder / "log", *flags, devices="test:1", credentials=credentials, env={"GRPC_VERBOSITY": "INFO"}
    ) as running:
        yield running


@pytest.mark.parametrize("kind", CALLERS)
def test_a_server_lets_in_no_caller_with_a_wrong_certificate(
    mutual: ServerProcess, certificates: Certificates, kind: str
) -> None:
    mutual.later_log_text()
    found = errors(mutual.address, tls(CALLERS[kind](), certificates.authority))
    assert isinstance(found[0], TlsError) == (kind == "key of another")
    if kind in REASONS:
        eventually(lambda: REASONS[kind] in mutual.later_log_text(), f"{kind} is in gRPC's log", mutual)


def test_an_intermediate_that_is_sent_is_enough(mutual: ServerProcess, certificates: Certificates) -> None:
    with Client(mutual.address, tls=tls(WITH_INTERMEDIATE, certificates.authority)) as client:
        assert client.server_info().version
    with fake_service(credentials=grpc.ssl_server_credentials([WITH_INTERMEDIATE])) as seen:
        channel = grpc.secure_channel(seen.address, grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes()))
        with channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)


def served(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Whether a connection of its own is let in."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.secure_channel(address, credentials, options) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        try:
            stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


@pytest.mark.slow
def test_callers_of_the_old_authority_stay_out_once_it_was_replaced(
    certificates: Certificates, tmp_path: Path
) -> None:
    rotating = certificates.copied(tmp_path)
    old, new = (certificates.credentials(pair) for pair in (certificates.caller(), issued()))
    with (
        run_server(tmp_path / "log", *rotating.mutual_flags, devices="test:1", credentials=old) as running,
        running.channel() as kept,
    ):
        info = server_pb2_grpc.ServerServiceStub(kept).GetServerInfo
        info(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
        assert (served(running.address, old), served(running.address, new)) == (True, False)
        AUTHORITY.cert_pem.write_to_path(rotating.client_ca)
        eventually(lambda: running.log_lines("certificates swapped"), "authorities are swapped", running)
        running.credentials = new
        assert (served(running.address, old), served(running.address, new)) == (False, True)
        info(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)  # what was connected stays so
