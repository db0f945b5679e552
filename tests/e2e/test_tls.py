"""A server with TLS on a real socket: who gets in, what they find, and what is read by whoever does not."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.calls import call_execute, call_unary, sample
from tests.client.fake_service import fake_service
from tests.e2e.harness import STREAMED, UNARY, case
from tests.fix_server import ServerProcess, StartServer, run_command, run_server, server_flags
from tests.fix_tls import Certificates

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import AsyncClient, Client, ConnectError, RetryPolicy, Tls, TlsError
from npugrad_server.config import SettingsError, load_settings

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server that shows a certificate and asks for none; test device, so that it starts quickly."""
    log_path = tmp_path_factory.mktemp("secured") / "server.log"
    with run_server(
        log_path, *certificates.flags, devices="test:1?compute=1", credentials=certificates.credentials()
    ) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server that asks for certificates as well."""
    log_path = tmp_path_factory.mktemp("mutual") / "server.log"
    credentials = certificates.credentials(certificates.caller())
    with run_server(
        log_path,
        *("--metrics-listen", "127.0.0.1:0", *certificates.mutual_flags),
        devices="test:1?compute=1",
        credentials=credentials,
    ) as running:
        yield running


def test_http_probes_need_no_certificate(mutual: ServerProcess) -> None:
    """Kubernetes' gRPC probe speaks no TLS, so these are what it can use."""
    assert [mutual.page(path) for path in ("/livez", "/readyz")] == [(200, "ok\n")] * 2


def refused(channel: grpc.Channel) -> None:
    """The connection does not come about, and not for want of a server."""
    stub = server_pb2_grpc.ServerServiceStub(channel)
    with channel, pytest.raises(grpc.RpcError) as caught:
        stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value


@pytest.fixture(params=["secured", "mutual"])
def either(request: pytest.FixtureRequest) -> ServerProcess:
    """Both of them, one after the other."""
    running: ServerProcess = request.getfixturevalue(request.param)
    return running


def test_everything_is_served_to_whom_it_is_for(either: ServerProcess) -> None:
    made = sample()
    with either.channel() as channel:
        unary = call_unary(channel, made.record, made.message())
        streamed = call_execute(channel, made.frames())
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        found = reflection.ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
        names = {service.name for service in next(found).list_services_response.service}
    assert {name: content.data for name, content in unary.contents.items()} == streamed.contents
    assert streamed.contents == made.reference()
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert {"npugrad.v1.BackwardService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("stream_from_bytes", [UNARY, STREAMED], ids=["unary", "execute"])
def test_client_gets_in_with_what_it_needs(
    either: ServerProcess, mutual: ServerProcess, certificates: Certificates, stream_from_bytes: int
) -> None:
    key, certificate = certificates.caller() if either is mutual else (None, None)
    tls = Tls(ca=certificates.authority, certificate=certificate, key=key)
    made = sample()
    call: dict[str, Any] = {**made.arrays, **made.call.attrs}
    with Client(either.address, tls=tls, stream_from_bytes=stream_from_bytes) as client:
        found = client.group_norm_backward(**call, timeout_s=TIMEOUT_S)
    assert found.grad_input.tobytes() == made.reference()["grad_input"]


def test_nobody_else_gets_an_answer(
    secured: ServerProcess, mutual: ServerProcess, certificates: Certificates
) -> None:
    stranger = certificates.caller(trusted=False)
    for what, channel in {
        "plaintext": grpc.insecure_channel(secured.address),
        "plaintext, mutual": grpc.insecure_channel(mutual.address),
        "of a caller that trusts another authority": grpc.secure_channel(
            secured.address, certificates.strangers_credentials()
        ),
        "no certificate": grpc.secure_channel(mutual.address, certificates.credentials()),
        "of another authority": grpc.secure_channel(mutual.address, certificates.credentials(stranger)),
    }.items():
        with case(what):
            refused(channel)


def test_log_and_output_say_that_it_is_secure(
    secured: ServerProcess, mutual: ServerProcess, server: ServerProcess
) -> None:
    found = [running.find_log("listening")["tls"] for running in (secured, mutual, server)]
    assert found == ["server", "mutual", "off"]


def test_unix_socket_can_be_secured(
    start_server: StartServer, certificates: Certificates, tmp_path: Path
) -> None:
    running = start_server(
        *certificates.flags,
        devices="test:1",
        listen=f"unix:{tmp_path}/s",
        check_end=False,
    )
    options = (("grpc.ssl_target_name_override", "localhost"),)
    with grpc.secure_channel(running.address, certificates.credentials(), options) as channel:
        info = server_pb2_grpc.ServerServiceStub(channel).GetServerInfo(
            server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S
        )
    assert info.product
    running.signal()
    assert running.wait() == 0


def small_command(*flags: str, listen: str = "127.0.0.1:0", command: str = "serve") -> tuple[int, str, str]:
    done = run_command(command, *server_flags(*flags, devices="test:1", listen=listen))
    return done.returncode, done.stdout, done.stderr


def test_server_with_wrong_files_does_not_start(certificates: Certificates) -> None:
    code, out, err = small_command("--tls-certificate", certificates.certificate, "--tls-key", "/none.key")
    assert code == 1
    assert "listening" not in out
    assert "npugrad-server: tls_key: cannot read '/none.key': No such file or directory" in err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tls_certificate", "tls_certificate: needs tls_key"),
        ("tls_key", "tls_key: needs tls_certificate"),
        ("tls_client_ca", "tls_client_ca: needs tls_certificate"),
    ],
)
def test_settings_that_do_not_go_together(name: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=rf"{problem}.*\(from flag\)"):
        load_settings({name: "a"})


@pytest.mark.slow
def test_check_tells_of_tls(certificates: Certificates) -> None:
    code, out, _ = small_command(*certificates.mutual_flags, command="check")
    assert code == 0, out
    assert (
        f"ok    TLS: certificate of {certificates.certificate!r}, serial {certificates.serial}, until " in out
    )
    assert "; callers need a certificate signed by an authority in" in out
    code, out, _ = small_command("--tls-certificate", certificates.key, "--tls-key", "none", command="check")
    assert code == 1
    assert "FAIL  tls_key: cannot read 'none'" in out
    assert f"FAIL  tls_certificate: {certificates.key!r} holds no certificate in PEM" in out


@pytest.mark.slow
def test_new_connections_get_a_certificate_that_was_swapped(
    certificates: Certificates, tmp_path: Path
) -> None:
    rotating = certificates.copied(tmp_path)
    credentials = rotating.credentials(certificates.caller())
    with run_server(
        tmp_path / "log",
        *("--metrics-listen", "127.0.0.1:0", *rotating.mutual_flags),
        devices="test:1?compute=1",
        credentials=credentials,
    ) as running:
        old = rotating.serial
        assert running.find_log("certificates")["serial"] == old
        with running.channel() as before:
            stub = server_pb2_grpc.ServerServiceStub(before)
            stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
            rotating.renew()
            line = running.find_log("certificates swapped", serial=rotating.serial)
            assert rotating.serial != old
            assert rotating.served_serial(running.address) == rotating.serial
            # What was connected before stays connected.
            stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
        samples = running.page("/metrics")[1]
        assert f'expiry_seconds{{file="tls_certificate",serial="{rotating.serial}"}}' in samples
        assert line["expires"].endswith("Z")


# -------------------------------------------------- what a person reads whose connection does not come about

_PAST: dict[str, Any] = {
    "not_before": datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
    "not_after": datetime.datetime(2021, 1, 1, tzinfo=datetime.timezone.utc),
}
_WANTS_ANOTHER = "as a server does if it requires a client certificate, or one from another authority (gRPC: "


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
