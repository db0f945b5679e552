"""A server with TLS on a real socket, called by plain gRPC channels: who gets in, and what they find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.calls import call_execute, call_unary, sample
from tests.fix_server import ServerProcess, StartServer, run_command, run_server, server_flags
from tests.fix_tls import Certificates

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import Client, Tls

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


@pytest.mark.parametrize("which", ["secured", "mutual"])
def test_calls_of_either_kind_are_served(request: pytest.FixtureRequest, which: str) -> None:
    server: ServerProcess = request.getfixturevalue(which)
    made = sample()
    with server.channel() as channel:
        unary = call_unary(channel, made.record, made.message())
        streamed = call_execute(channel, made.frames())
    assert {name: content.data for name, content in unary.contents.items()} == streamed.contents
    assert streamed.contents == made.reference()


@pytest.mark.parametrize("which", ["secured", "mutual"])
@pytest.mark.parametrize("stream_from_bytes", [2**20, 0], ids=["unary", "execute"])
def test_client_gets_in_with_what_it_needs(
    request: pytest.FixtureRequest, certificates: Certificates, which: str, stream_from_bytes: int
) -> None:
    server: ServerProcess = request.getfixturevalue(which)
    key, certificate = certificates.caller() if which == "mutual" else (None, None)
    tls = Tls(ca=certificates.authority, certificate=certificate, key=key)
    made = sample()
    call: dict[str, Any] = {**made.arrays, **made.call.attrs}
    with Client(server.address, tls=tls, stream_from_bytes=stream_from_bytes) as client:
        found = client.group_norm_backward(**call, timeout_s=TIMEOUT_S)
    assert found.grad_input.tobytes() == made.reference()["grad_input"]


@pytest.mark.parametrize("which", ["secured", "mutual"])
def test_health_and_reflection_are_there(request: pytest.FixtureRequest, which: str) -> None:
    server: ServerProcess = request.getfixturevalue(which)
    with server.channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        found = reflection.ServerReflectionInfo(iter([asked]), timeout=TIMEOUT_S)
        names = {service.name for service in next(found).list_services_response.service}
        assert {"npugrad.v1.BackwardService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("which", ["secured", "mutual"])
def test_plaintext_gets_no_answer(request: pytest.FixtureRequest, which: str) -> None:
    refused(grpc.insecure_channel(request.getfixturevalue(which).address))


def test_caller_that_trusts_another_authority_does_not_talk(
    secured: ServerProcess, certificates: Certificates
) -> None:
    refused(grpc.secure_channel(secured.address, certificates.strangers_credentials()))


def test_mutual_tls_wants_a_certificate(mutual: ServerProcess, certificates: Certificates) -> None:
    refused(grpc.secure_channel(mutual.address, certificates.credentials()))


def test_mutual_tls_wants_one_of_its_authority(mutual: ServerProcess, certificates: Certificates) -> None:
    stranger = certificates.caller(trusted=False)
    refused(grpc.secure_channel(mutual.address, certificates.credentials(stranger)))


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
    ("flags", "problem"),
    [
        (("--tls-certificate", "a"), "tls_certificate: needs tls_key"),
        (("--tls-key", "a"), "tls_key: needs tls_certificate"),
        (("--tls-client-ca", "a"), "tls_client_ca: needs tls_certificate"),
    ],
)
def test_settings_that_do_not_go_together(flags: tuple[str, ...], problem: str) -> None:
    code, _, err = small_command(*flags)
    assert code == 2
    assert f"npugrad-server: {problem}" in err
    assert "(from flag)" in err


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
