"""A server with TLS on a real socket: who gets in, what they find, and what is read by whoever does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.calls import call_execute, call_unary, sample
from tests.client.both import Looped
from tests.client.fake_service import fake_service
from tests.e2e.harness import STREAMED, UNARY, case, eventually
from tests.fix_server import ServerProcess, StartServer, run_command, run_quick_server, server_flags
from tests.fix_tls import CLIENT_ONLY, SERVER_ONLY, Certificates, signed_again
from tests.proofs.callers import arguments

from npugrad.v1 import server_pb2, server_pb2_grpc
from npugrad_client import Client, ConnectError, RetryPolicy, Tls, TlsError
from npugrad_server.config import SettingsError, load_settings

TIMEOUT_S = 30
AUTHORITY, OTHER = trustme.CA(), trustme.CA()
INTERMEDIATE = AUTHORITY.create_child_ca()
PAST, FUTURE = (datetime(year, 1, 1, tzinfo=timezone.utc) for year in (2021, 2100))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server that shows a certificate and asks for none; test device, so that it starts quickly."""
    log_path = tmp_path_factory.mktemp("secured") / "server.log"
    with run_quick_server(
        log_path, *certificates.flags, devices="test:1?compute=1", credentials=certificates.credentials()
    ) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[ServerProcess]:
    """A server that asks for certificates as well, of two authorities; gRPC's own log is in its log."""
    folder = tmp_path_factory.mktemp("mutual")
    trusted = Path(certificates.client_ca).read_bytes() + AUTHORITY.cert_pem.bytes()
    (folder / "callers.pem").write_bytes(trusted)
    flags = (*certificates.flags, "--tls-client-ca", str(folder / "callers.pem"))
    with run_quick_server(
        folder / "server.log",
        *("--metrics-listen", "127.0.0.1:0", *flags),
        devices="test:1?compute=1",
        credentials=certificates.credentials(certificates.caller()),
        env={"GRPC_VERBOSITY": "INFO"},
    ) as running:
        yield running


def info(channel: grpc.Channel) -> server_pb2.GetServerInfoResponse:
    stub = server_pb2_grpc.ServerServiceStub(channel)
    return stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)


def is_served(channel: grpc.Channel) -> bool:
    """Whether a connection comes about; not for want of a server if it does not."""
    with channel:
        try:
            return bool(info(channel).product)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


def test_http_probes_need_no_certificate(mutual: ServerProcess) -> None:
    """Kubernetes' gRPC probe speaks no TLS, so these are what it can use."""
    assert [mutual.page(path) for path in ("/livez", "/readyz")] == [(200, "ok\n")] * 2


@pytest.fixture(params=["secured", "mutual"])
def either(request: pytest.FixtureRequest) -> ServerProcess:
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
    with Client(either.address, tls=tls, stream_from_bytes=stream_from_bytes) as client:
        found = client.group_norm_backward(**arguments(), timeout_s=TIMEOUT_S)
    assert found.grad_input.tobytes() == sample().reference()["grad_input"]


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
            assert not is_served(channel)


def test_log_and_output_say_that_it_is_secure(
    secured: ServerProcess, mutual: ServerProcess, server: ServerProcess
) -> None:
    found = [running.find_log("listening")["tls"] for running in (secured, mutual, server)]
    assert found == ["server", "mutual", "off"]


def test_unix_socket_can_be_secured(
    start_server: StartServer, certificates: Certificates, tmp_path: Path
) -> None:
    running = start_server(
        *certificates.flags, devices="test:1", listen=f"unix:{tmp_path}/s", check_end=False
    )
    options = (("grpc.ssl_target_name_override", "localhost"),)
    assert is_served(grpc.secure_channel(running.address, certificates.credentials(), options))
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
    with run_quick_server(
        tmp_path / "log",
        *("--metrics-listen", "127.0.0.1:0", *rotating.mutual_flags),
        devices="test:1?compute=1",
        credentials=credentials,
    ) as running:
        old = rotating.serial
        assert running.find_log("certificates")["serial"] == old
        with running.channel() as before:
            info(before)
            rotating.renew()
            line = running.find_log("certificates swapped", serial=rotating.serial)
            assert rotating.serial != old
            assert rotating.served_serial(running.address) == rotating.serial
            # What was connected before stays connected.
            info(before)
        samples = running.page("/metrics")[1]
        assert f'expiry_seconds{{file="tls_certificate",serial="{rotating.serial}"}}' in samples
        assert line["expires"].endswith("Z")


@pytest.mark.slow
def test_callers_of_the_old_authority_stay_out_once_it_was_replaced(
    certificates: Certificates, tmp_path: Path
) -> None:
    rotating = certificates.copied(tmp_path)
    old, new = (certificates.credentials(pair) for pair in (certificates.caller(), issued()))
    with (
        run_quick_server(
            tmp_path / "log", *rotating.mutual_flags, devices="test:1", credentials=old
        ) as running,
        running.channel() as kept,
    ):

        def served() -> list[bool]:
            options = (("grpc.use_local_subchannel_pool", 1),)
            channels = (grpc.secure_channel(running.address, each, options) for each in (old, new))
            return [is_served(channel) for channel in channels]

        info(kept)
        assert served() == [True, False]
        AUTHORITY.cert_pem.write_to_path(rotating.client_ca)
        eventually(lambda: running.log_lines("certificates swapped"), "authorities are swapped", running)
        running.credentials = new
        assert served() == [False, True]
        info(kept)  # what was connected stays so


# --------------------------------------------------------------------------------------- wrong certificates

Pair = tuple[bytes | None, bytes | None]
"""Key and certificate, or neither."""


def issued(by: trustme.CA = AUTHORITY, name: str = "127.0.0.1", *, chain: int = 1, **changes: Any) -> Any:
    """Key and certificates; with `changes`, signed again."""
    made = by.issue_cert(name)
    pem = made.cert_chain_pems[0].bytes()
    if changes:
        pem = signed_again(pem, by, **changes)
    rest = b"".join(one.bytes() for one in made.cert_chain_pems[1:chain])
    return made.private_key_pem.bytes(), pem + rest


COMMON: dict[str, Callable[[], Pair]] = {
    "expired": lambda: issued(ends=PAST),
    "not yet valid": lambda: issued(starts=FUTURE, ends=FUTURE.replace(year=2101)),
    "wrong CA": lambda: issued(OTHER),
    "missing intermediate": lambda: issued(INTERMEDIATE),
}
SERVERS: dict[str, Callable[[], Pair]] = {
    **COMMON,
    "wrong usage": lambda: issued(usages=CLIENT_ONLY),
    "wrong host name": lambda: issued(name="elsewhere.example.org"),
}
CALLERS: dict[str, Callable[[], Pair]] = {
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


def tls(pair: Pair = (None, None), ca: bytes | str | None = None) -> Tls:
    return Tls(ca=ca or AUTHORITY.cert_pem.bytes(), key=pair[0], certificate=pair[1])


def read(address: str, how: Tls | None) -> list[ConnectError]:
    """How both clients fail; neither takes long over it."""
    started, found = time.monotonic(), []
    for make in (Client, Looped):
        with make(address, tls=how) as client, pytest.raises(ConnectError) as caught:
            client.server_info()
        found.append(caught.value)
    assert time.monotonic() - started < 25
    return found


@pytest.mark.parametrize("is_mutual", [False, True], ids=["server only", "mutual"])
def test_a_client_talks_to_no_server_with_a_wrong_certificate(is_mutual: bool) -> None:
    """Servers of another kind: ours does not start with most of these."""
    root = AUTHORITY.cert_pem.bytes()
    for kind, make in SERVERS.items():
        credentials = grpc.ssl_server_credentials([make()], root if is_mutual else None, is_mutual)  # type: ignore[list-item]
        with case(kind), fake_service(credentials=credentials) as seen:
            for error in read(seen.address, tls(issued() if is_mutual else (None, None))):
                assert isinstance(error, TlsError), error
            assert seen.methods == []


def test_a_server_lets_in_no_caller_with_a_wrong_certificate(
    mutual: ServerProcess, certificates: Certificates
) -> None:
    for kind, make in CALLERS.items():
        with case(kind):
            mutual.later_log_text()
            found = read(mutual.address, tls(make(), certificates.authority))
            assert isinstance(found[0], TlsError) == (kind == "key of another")
            if kind in REASONS:
                eventually(lambda: REASONS[kind] in mutual.later_log_text(), "gRPC's log says why", mutual)  # noqa: B023


def test_an_intermediate_that_is_sent_is_enough(mutual: ServerProcess, certificates: Certificates) -> None:
    whole = issued(INTERMEDIATE, chain=2)
    with Client(mutual.address, tls=tls(whole, certificates.authority)) as client:
        assert client.server_info().version
    with fake_service(credentials=grpc.ssl_server_credentials([whole])) as seen:
        channel = grpc.secure_channel(seen.address, grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes()))
        with channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)


# -------------------------------------------------- what a person reads whose connection does not come about

_WANTS_ANOTHER = "as a server does if it requires a client certificate, or one from another authority (gRPC: "
REFUSALS: dict[str, tuple[Callable[[Certificates], Tls | None], str]] = {
    "no certificate": (lambda c: Tls(ca=c.authority), _WANTS_ANOTHER),
    "a stranger's": (lambda c: tls(c.caller(trusted=False), c.authority), _WANTS_ANOTHER),
    "plain": (
        lambda c: None,
        "as a server does if it only speaks TLS; then pass tls=True or Tls(ca=...) (gRPC: ",
    ),
}
"""How our server is called, and what is read then: nothing tells that it is a TLS error."""
_UNUSABLE = "ca, certificate or key cannot be used, or the key belongs to another certificate"
_NO_PEM = b"-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"
FAILURES: dict[str, tuple[Callable[[Certificates], Tls], str]] = {
    "another authority": (
        lambda c: Tls(ca=c.client_ca),
        "the server's certificate is signed by an authority that is not trusted; name it with Tls(ca=...)",
    ),
    "another name": (
        lambda c: Tls(ca=c.authority, server_name="elsewhere.example.org"),
        "the server's certificate is for another name than the target; set it with Tls(server_name=...)",
    ),
    "no authority": (lambda c: tls(c.caller(), _NO_PEM), _UNUSABLE),
    "key of another": (lambda c: tls((c.caller()[0], c.caller()[1]), c.authority), _UNUSABLE),
}
"""The same where it is one, which no retry changes."""


def assert_failed(address: str, how: Tls, said: str) -> None:
    for error in read(address, how):
        assert isinstance(error, TlsError)
        assert error.tries == 1
        assert str(error).startswith(f"server_info: no encrypted connection to {address}: {said} (gRPC: ")


@pytest.mark.parametrize("what", REFUSALS)
def test_a_client_that_is_not_let_in_reads_what_may_be_wrong(
    what: str, mutual: ServerProcess, certificates: Certificates
) -> None:
    how, said = REFUSALS[what]
    expected = f"server_info: cannot reach {mutual.address}: it closed the connection, {said}"
    for error in read(mutual.address, how(certificates)):
        assert str(error).startswith(expected)
        assert error.tries <= RetryPolicy().max_tries, "taken for a server that is lost"


@pytest.mark.parametrize("what", FAILURES)
def test_a_client_that_gets_no_encrypted_connection_reads_why(
    what: str, mutual: ServerProcess, certificates: Certificates
) -> None:
    how, said = FAILURES[what]
    assert_failed(mutual.address, how(certificates), said)


def test_a_client_reads_that_the_server_is_plain_or_its_certificate_has_expired(
    server: ServerProcess, certificates: Certificates
) -> None:
    """The latter of a server of another kind: ours does not start with one."""
    assert_failed(server.address, Tls(ca=certificates.authority), "the server does not speak TLS")
    expired: Any = issued(ends=PAST)
    with fake_service(credentials=grpc.ssl_server_credentials([expired])) as seen:
        assert_failed(seen.address, tls(), "the server's certificate has expired")
