"""Whose call an RPC is, with real certificates over real connections: never whoever the caller says it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status
from tests.fix_tls import Certificates

from npugrad.status import decode_status
from npugrad.v1 import server_pb2
from npugrad_server.metrics import Metrics
from npugrad_server.rpc.funnel import Funnel, RpcCall
from npugrad_server.rpc.identity import Identities
from npugrad_server.rpc.register import register
from npugrad_server.tenants import LiveTenants, parse_tenants

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
METHOD = f"/{SERVICE.full_name}/GetServerInfo"
HEADER = "x-npugrad-tenant"
EDGE, BATCH, VISION = "edge.example.org", "spiffe://example.org/batch", "vision.example.org"
FILE = f"""
gateways = ["{EDGE}"]
[[tenant]]
name = "batch"
identities = ["{BATCH}", "batch-by-gateway"]
[[tenant]]
name = "vision"
identities = ["{VISION}"]
weight = 4
"""
STRICT = FILE.replace("[[tenant]]", "[unlisted]\nrefuse = true\n[[tenant]]", 1)
Metadata = tuple[tuple[str, str], ...]


async def tenants_of(calls: Any, certificates: Certificates, file: str = FILE) -> list[str]:
    """Names of the tenants of calls, or the message and reason they are refused with.

    Args:
        calls: Of each, the names in the caller's certificate, None for plaintext; and its metadata.
        certificates: Who signs.
        file: The file of tenants.
    """
    return [await _call(names, metadata, certificates, file) for names, metadata in calls]


async def _call(
    names: Sequence[str] | None, metadata: Metadata, certificates: Certificates, file: str
) -> str:
    seen: list[str] = []

    async def handler(message: Any, call: RpcCall) -> Any:
        seen.append(call.tenant.name)
        return server_pb2.GetServerInfoResponse()

    server, port = _open(handler, certificates, file, is_mutual=names is not None)
    await server.start()
    target = f"127.0.0.1:{port}"
    if names is None:
        channel = grpc.aio.insecure_channel(target)
    else:
        caller = certificates.named_caller(*names) if names else certificates.caller("a@example.org")
        channel = grpc.aio.secure_channel(target, certificates.credentials(caller))
    try:
        async with channel:
            call: Any = channel.unary_unary(METHOD)
            await call(b"", metadata=metadata, timeout=30)
    except grpc.aio.AioRpcError as error:
        return _refused(error)
    finally:
        await server.stop(0)
    return seen[0]


def _refused(error: grpc.aio.AioRpcError) -> str:
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED, error
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it takes both kinds
    assert status is not None
    told = decode_status(status)
    assert told is not None
    assert told.reason == "TENANT_REFUSED"
    return str(error.details())


def _open(handler: Any, certificates: Certificates, file: str, *, is_mutual: bool) -> tuple[Any, int]:
    tenants = LiveTenants()
    tenants.table = parse_tenants("the file", file.encode())
    funnel = Funnel(Metrics("0", "atlas-a2"), Identities(tenants, HEADER, verified=is_mutual))
    server = grpc.aio.server(interceptors=(funnel,))
    unary = funnel.unary("GetServerInfo", handler)
    register(server, SERVICE, {"GetServerInfo": unary, "ListOperators": unary})
    if not is_mutual:
        return server, server.add_insecure_port("127.0.0.1:0")
    pair = Path(certificates.key).read_bytes(), Path(certificates.certificate).read_bytes()
    ca = Path(certificates.client_ca).read_bytes()
    credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=True)
    return server, server.add_secure_port("127.0.0.1:0", credentials)


async def test_the_names_of_a_verified_certificate_decide(certificates: Certificates) -> None:
    calls = [
        ((BATCH,), ()),
        ((VISION,), ()),
        (("other.example.org", VISION), ()),
        ((VISION, BATCH), ()),  # of several, those of SPIFFE come first
        (("VISION.example.org",), ()),
        (("https://example.org/batch", VISION), ()),
    ]
    assert await tenants_of(calls, certificates) == ["batch", "vision", "vision", "batch", "vision", "vision"]


async def test_an_identity_in_no_entry_is_a_tenant_of_its_own_or_refused(certificates: Certificates) -> None:
    calls: Any = [(("spiffe://example.org/new",), ()), ((f"not-{VISION}",), ()), ((), ()), (None, ())]
    assert await tenants_of(calls, certificates) == [
        "certificate:spiffe://example.org/new",
        f"certificate:not-{VISION}",
        "ipv4:127.0.0.1",
        "ipv4:127.0.0.1",
    ]
    refused = await tenants_of([*calls, ((VISION,), ())], certificates, STRICT)
    assert refused[0].startswith("tenant: found certificate:spiffe://example.org/new, which is not listed")
    assert [" is not listed" in told for told in refused] == [True, True, True, True, False]


async def test_a_gateway_says_whose_call_it_is_and_nobody_else_does(certificates: Certificates) -> None:
    said: Metadata = ((HEADER, "batch-by-gateway"),)
    calls: Any = [
        ((EDGE,), said),
        ((EDGE,), ((HEADER, "new"),)),
        ((EDGE,), ()),
        ((EDGE,), ((HEADER, ""),)),
        ((EDGE,), said * 2),
        ((EDGE,), ((HEADER, "x" * 256),)),
        ((VISION,), said),
        ((), said),
        (None, said),
        ((VISION,), ((HEADER, ""),)),
    ]
    found = await tenants_of(calls, certificates)
    assert found[:2] == ["batch", "header:new"]
    assert found[2] == found[3]
    assert found[2].startswith(f"{HEADER}: found none from gateway {EDGE}; expected the caller's tenant")
    assert found[4] == f"{HEADER}: found it more than once; expected it once"
    assert found[5].startswith(f"{HEADER}: found a value that is too long or not text from gateway {EDGE}")
    only = "expected it from a listed gateway only"
    assert found[6] == f"{HEADER}: found it from {VISION}; {only}"
    assert found[7] == found[8] == f"{HEADER}: found it from a caller without an identity; {only}"
    assert found[9] == found[6]


async def test_what_a_caller_claims_elsewhere_means_nothing(certificates: Certificates) -> None:
    claims: Metadata = (
        ("tenant", "vision"),
        ("x-forwarded-client-cert", f"URI={BATCH}"),
        ("x-npugrad-tenants", "vision"),
        ("authorization", f"Bearer {VISION}"),
        ("x-request-id", VISION),
    )
    calls: Any = [((BATCH,), claims), (None, claims)]
    assert await tenants_of(calls, certificates) == ["batch", "ipv4:127.0.0.1"]


class Context:
    """What `Identities` asks of gRPC, counted."""

    def __init__(self, facts: dict[str, list[bytes]], peer: str) -> None:
        self.facts, self.peer_name = facts, peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return self.facts

    def invocation_metadata(self) -> Metadata:
        return ()

    def peer(self) -> str:
        return self.peer_name


def named(peer: str, facts: dict[str, list[bytes]] | None = None) -> str:
    context: Any = Context(facts or {}, peer)
    return IDENTITIES.tenant_of(context).name


TENANTS = LiveTenants()
IDENTITIES = Identities(TENANTS, HEADER, verified=True)


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:10.0.0.7:41234", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:41234", "ipv6:%5B::1%5D"),
        ("unix:", "unix"),
        ("unix:/run/npugrad.sock", "unix"),
        ("", ""),
    ],
)
def test_all_connections_of_one_host_are_one_tenant(peer: str, name: str) -> None:
    assert named(peer) == name


def test_a_connection_from_the_port_of_another_one_is_not_taken_for_it() -> None:
    first = {"x509_pem_cert": [b"first"], "peer_dns": [b"a.example"]}
    second = {"x509_pem_cert": [b"second"], "peer_dns": [b"b.example"]}
    peer = "ipv4:10.0.0.8:1"
    told = [named(peer, facts) for facts in (first, second, first, None)]
    assert told == [
        "certificate:a.example",
        "certificate:b.example",
        "certificate:a.example",
        "ipv4:10.0.0.8",
    ]


def test_only_so_many_callers_are_remembered() -> None:
    assert len({named(f"ipv4:10.1.{port % 7}.1:{port}") for port in range(3000)}) == 7
    assert len(TENANTS.table.remembered) <= 1024


def test_a_new_table_counts_at_once_for_callers_that_were_remembered() -> None:
    facts = {"x509_pem_cert": [b"it"], "peer_uri": [BATCH.encode()]}
    assert named("ipv4:10.0.0.9:1", facts) == f"certificate:{BATCH}"
    old, TENANTS.table = TENANTS.table, parse_tenants("the file", FILE.encode())
    try:
        assert named("ipv4:10.0.0.9:1", facts) == "batch"
    finally:
        TENANTS.table = old
