"""Envoy with what ``deploy/gateway/envoy-jwt.yaml`` adds: the subject of a verified token is the tenant."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.e2e.harness import eventually
from tests.fix_server import ServerProcess, StartServer
from tests.fix_tls import Certificates
from tests.proofs.proxies import ENVOY

from npugrad.v1 import server_pb2, server_pb2_grpc

FILE = ENVOY.file.with_name("envoy-jwt.yaml")
HEADER, VISION = "x-npugrad-tenant", "vision.example.org"
TENANTS = "gateways = ['edge.example.org']\n[unlisted]\nrefuse = true\n" + "".join(
    f"[[tenant]]\nname = '{name}'\nidentities = ['{name}.example.org']\n"
    for name in ("vision", "audio", "watch")
)


_NAMED = (("grpc.ssl_target_name_override", "localhost"),)
"""The gateway listens at an address that its certificate does not name."""
FORGED: tuple[tuple[str, ...], ...] = ((VISION,), (VISION, VISION), ("",))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """Signs tokens with a key of its own, which `keys` verify as JWKS."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        numbers = self._key.public_key().public_numbers()
        x, y = (_text(number.to_bytes(32, "big")) for number in (numbers.x, numbers.y))
        key = {"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "example", "x": x, "y": y}
        self.keys = json.dumps({"keys": [key]})

    def token(self, **claims: Any) -> str:
        """A good token, but for the claims given here; None leaves one out."""
        good = {
            "iss": "https://issuer.example.org",
            "aud": "npugrad",
            "sub": VISION,
            "exp": time.time() + 3600,
        }
        payload = {name: value for name, value in {**good, **claims}.items() if value is not None}
        head = {"alg": "ES256", "typ": "JWT", "kid": "example"}
        signed = ".".join(_text(json.dumps(part).encode()) for part in (head, payload))
        pair = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_text(b''.join(number.to_bytes(32, 'big') for number in pair))}"


def with_tokens(text: str, keys: str, certificates: Certificates, folder: Path) -> str:
    """The settings of Envoy with the parts of the file; keys, certificates and the servers' name are ours."""
    parts = yaml.safe_load(FILE.read_text("utf-8"))
    parts["http_filters"][0]["typed_config"]["providers"]["site"]["local_jwks"]["inline_string"] = keys
    edge_key, edge = certificates.named_caller("edge.example.org")
    (folder / "gateway.key").write_bytes(edge_key)
    (folder / "gateway.crt").write_bytes(edge)
    files = {"listener.crt": certificates.certificate, "listener.key": certificates.key}
    files |= {"servers-ca.crt": certificates.authority}
    files |= {name: str(folder / name) for name in ("gateway.crt", "gateway.key")}
    sockets = json.dumps([parts["listener_transport_socket"], parts["cluster_transport_socket"]])
    for name, path in files.items():
        assert f"/etc/envoy/{name}" in sockets
        sockets = sockets.replace(f"/etc/envoy/{name}", path)
    settings = yaml.safe_load(text)
    listener, cluster = (settings["static_resources"][kind][0] for kind in ("listeners", "clusters"))
    sockets = sockets.replace("npugrad-headless", "localhost")
    chain = listener["filter_chains"][0]
    chain["transport_socket"], cluster["transport_socket"] = json.loads(sockets)
    filters = chain["filters"][0]["typed_config"]["http_filters"]
    filters[:0] = parts["http_filters"]
    return yaml.safe_dump(settings)


def _bad_tokens(issuer: Issuer) -> dict[str, tuple[str, ...]]:
    head, payload, _ = issuer.token().split(".")
    nobody = _text(b'{"alg": "none", "kid": "example"}')
    return {
        "none": (),
        "no JWT": ("it",),
        "of another key": (Issuer().token(),),
        "without a signature": (f"{nobody}.{payload}.",),
        "with another one's signature": (f"{head}.{payload}.{issuer.token(sub='x').rpartition('.')[2]}",),
        "expired": (issuer.token(exp=time.time() - 3600),),
        "without an end": (issuer.token(exp=None),),
        "of another issuer": (issuer.token(iss="https://elsewhere.example.org"),),
        "for another audience": (issuer.token(aud="elsewhere"),),
        "good and bad": (issuer.token(), "it"),
    }


@contextmanager
def _gateway(
    server: ServerProcess, keys: str, certificates: Certificates, folder: Path
) -> Iterator[grpc.Channel]:
    def settings(text: str, listen: str, servers: Sequence[ServerProcess], where: Path) -> str:
        return with_tokens(ENVOY.settings(text, listen, servers, where), keys, certificates, where)

    with (
        replace(ENVOY, settings=settings).running([server], folder) as address,
        grpc.secure_channel(address, certificates.credentials(), options=_NAMED) as channel,
    ):
        yield channel


@pytest.mark.slow
@pytest.mark.deep
def test_the_subject_of_a_verified_token_is_the_tenant_and_nothing_that_a_caller_says(
    tmp_path: Path, certificates: Certificates, start_server: StartServer
) -> None:
    if ENVOY.missing():
        pytest.skip(ENVOY.missing())
    (tmp_path / "tenants.toml").write_text(TENANTS)
    server = start_server(
        *(*certificates.mutual_flags, "--tenants", str(tmp_path / "tenants.toml")),
        devices="test:1?compute=1",
        credentials=certificates.credentials(certificates.named_caller("watch.example.org")),
    )
    exercise(server, certificates, tmp_path / "gateway")


def exercise(server: ServerProcess, certificates: Certificates, folder: Path) -> None:
    """Good and bad tokens, each with and without the header that is not a caller's to send."""
    issuer = Issuer()
    with _gateway(server, issuer.keys, certificates, folder) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1  # SERVING
        for name, bad in _bad_tokens(issuer).items():
            for forged in ((), *FORGED):
                assert _call(channel, *bad, says=forged) in ("UNAUTHENTICATED", "PERMISSION_DENIED"), name
        assert _call(channel, issuer.token()) == "OK"
        for forged in FORGED:
            assert _call(channel, issuer.token(sub="audio.example.org"), says=forged) == "OK"
        eventually(lambda: _tenants(server)["audio"] == len(FORGED), "all calls are in the log", server)
        assert not server.log_lines("refused"), "a call without a good token reached the server"
        assert _call(channel, issuer.token(sub=None), says=(VISION,)) == "PERMISSION_DENIED"
        assert _call(channel, issuer.token(sub="nobody"), says=(VISION,)) == "PERMISSION_DENIED"
        assert "found none from gateway" in server.find_log("refused", reason="TENANT_REFUSED")["error"]
    found = _tenants(server)
    assert set(found) - {"watch"} == {"vision", "audio"}
    assert found["vision"] == 1


def _tenants(server: ServerProcess) -> Counter[str]:
    return Counter(line["tenant"] for line in server.log_lines("call") if line["status"] == "OK")


def _call(channel: grpc.Channel, *tokens: str, says: Sequence[str] = ()) -> str:
    bearers = (("authorization", f"Bearer {token}") for token in tokens)
    metadata = (*bearers, *((HEADER, said) for said in says))
    stub = server_pb2_grpc.ServerServiceStub(channel)
    try:
        stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
