"""The demo starts a service of its own and leaves nothing behind."""

from __future__ import annotations

import pytest

from npugrad_client import Client, ConnectError
from npugrad_client.demo._service import local_service

SMALL = ("--metrics-listen", "", "--prefault-bytes", "0")


def test_service_answers_and_is_gone_afterwards() -> None:
    with local_service(*SMALL) as address, Client(address, timeout_s=10) as client:
        assert client.server_info().devices[0].state == "ready"
    with Client(address, retry=None) as client, pytest.raises(ConnectError):
        client.server_info()


def test_service_that_cannot_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="nosuch"), local_service(*SMALL, "--devices", "nosuch:0"):
        pytest.fail("expected no service")
