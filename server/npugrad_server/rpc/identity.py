"""Whose call an RPC is. A caller's own word never decides it."""

from __future__ import annotations

from functools import lru_cache

from npugrad_server.pool.tenant import Tenant


@lru_cache(maxsize=1024)
def tenant_of_peer(peer: str) -> Tenant:
    """The tenant of a caller of whom only the address is known: all connections of one host are one tenant.

    Args:
        peer: As gRPC writes it, such as ``"ipv4:10.0.0.7:41234"``, ``"ipv6:%5B::1%5D:41234"`` or ``"unix:"``.
    """
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else ""
    return Tenant(f"{kind}:{host}" if host else kind)
