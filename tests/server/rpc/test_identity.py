from __future__ import annotations

import pytest

from npugrad_server.rpc.identity import tenant_of_peer


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
    assert tenant_of_peer(peer).name == name
