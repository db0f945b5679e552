"""A small `make prove-gateways`: the gateways that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.proofs.gateways import PARTS, GatewaySize
from tests.proofs.proxies import PROXIES, Proxy
from tests.proofs.rollout import Size

SMALL = GatewaySize(
    large_calls=1,
    long_s=1.0,
    rollout=Size(calls=100, held_s=1.5, drain_delay_s=1.0, left_alone_s=0.5, endpoint_lag_s=0.1),
)


@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
def test_a_gateway_as_it_is_shipped_loses_no_call(proxy: Proxy, tmp_path: Path) -> None:
    if proxy.missing():
        pytest.skip(proxy.missing())
    for name, part in PARTS.items():
        for row in part(proxy, SMALL, tmp_path / name):
            assert row.calls, row
            assert not row.failed, row
