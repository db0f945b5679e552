"""Determines the tenant of an RPC. A caller's own word never decides it.

In this order
    - The caller's certificate, which the handshake verified: its ``spiffe://`` URIs and its DNS names. Its
      subject, other URIs, email addresses and IP addresses do not count.
    - If one of those names is a listed gateway's, what the gateway says in the header.
    - Without any such name, the Unix socket that it came by, whose file mode says who may, or the address.

If anybody else sends the header, the call is refused rather than the header ignored: it is a forgery, or it
comes from an unlisted gateway, all of whose callers would silently be one tenant. For the same reason, a
gateway that does not name the tenant is refused. Other metadata, labels and priorities have no effect here.

Tenants are cached by the whole certificate, the socket or address, and the header.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from npugrad.errors import TenantRefused
from npugrad_server.tenants import MAX_IDENTITY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import grpc.aio

    from npugrad_server.pool.tenant import Tenant
    from npugrad_server.tenants import LiveTenants, TenantTable

    Context = grpc.aio.ServicerContext[Any, Any]
    AuthContext = Mapping[str, Iterable[bytes]]

_CERTIFICATE, _SPIFFE = "x509_pem_cert", b"spiffe://"
_MAX_REMEMBERED = 1024
"""Maximum number of callers whose tenant is cached."""
ARRIVED_BY: ContextVar[str] = ContextVar("ARRIVED_BY", default="")
"""In the task of an RPC, the Unix socket that it came by; empty for TCP."""


class Identities:
    """Determines the tenants of RPCs."""

    def __init__(self, tenants: LiveTenants, header: str, *, verified: bool) -> None:
        """Stores the arguments.

        Args:
            tenants: The table of tenants.
            header: Metadata key in which gateways name a call's tenant.
            verified: Whether callers present certificates.
        """
        self._tenants, self._header, self._verified = tenants, header, verified

    def tenant_of(self, context: Context) -> Tenant:
        """The tenant of an RPC.

        Raises:
            TenantRefused: The caller may not send the header, a gateway did not send it exactly once, or the
                caller is not listed and such callers are refused.
        """
        facts: AuthContext = context.auth_context() if self._verified else {}
        claimed, header = None, self._header
        for key, value in context.invocation_metadata() or ():
            if key == header:
                if claimed is not None:
                    raise TenantRefused(f"{header}: found it more than once; expected it once")
                claimed = value
        table = self._tenants.table
        address = address_of(context)
        caller = (*facts.get(_CERTIFICATE, ()), address)
        tenant = table.remembered.get((caller, claimed))
        if tenant is None:
            tenant = self._find(table, facts, address, claimed)
            if len(table.remembered) >= _MAX_REMEMBERED:
                table.remembered.clear()
            table.remembered[caller, claimed] = tenant
        return tenant

    def _find(
        self, table: TenantTable, facts: AuthContext, address: str, claimed: str | bytes | None
    ) -> Tenant:
        names = _names(facts)
        gateway = next((name for name in names if name in table.gateways), None)
        if gateway is not None:
            if not isinstance(claimed, str) or not 0 < len(claimed) <= MAX_IDENTITY:
                raise TenantRefused(
                    f"{self._header}: found {'a value that is too long or not text' if claimed else 'none'} "
                    f"from gateway {gateway}; expected the caller's tenant, at most {MAX_IDENTITY} characters"
                )
            return table.tenant("header", claimed)
        if claimed is not None:
            sender = names[0] if names else "a caller without an identity"
            raise TenantRefused(
                f"{self._header}: found it from {sender}; expected it from a listed gateway only"
            )
        if names:
            return table.tenant("certificate", *names)
        return table.arrived_by(address)


def address_of(context: Context) -> str:
    """The name of a caller without an identity: its socket, or its peer without the port."""
    return ARRIVED_BY.get() or host_of(context.peer())


def host_of(peer: str) -> str:
    """A peer without its port, such as ``"ipv4:10.0.0.7"``; the name of a tenant without an identity."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else ""
    return f"{kind}:{host}" if host else kind


def _names(facts: AuthContext) -> tuple[str, ...]:
    """The identities in a verified certificate, SPIFFE URIs first."""
    uris = [uri for uri in facts.get("peer_uri", ()) if uri.startswith(_SPIFFE)]
    hosts = [host.lower() for host in facts.get("peer_dns", ())]
    return tuple(name.decode(errors="backslashreplace") for name in (*uris, *hosts))
