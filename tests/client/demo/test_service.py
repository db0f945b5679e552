"""The demo starts a service of its own and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npugrad_client import Client, ConnectError
from npugrad_client.demo._service import local_service

SMALL = ("--metrics-listen", "", "--prefault-bytes", "0")


def test_service_answers_and_is_gone_afterwards() -> None:
    with local_service(*SMALL) as address, Client(address, timeout_s=10) as client:
        assert client.server_info().devices[0].state == "ready"
    with Client(address, retry=None) as client, pytest.raises(ConnectError):
        client.server_info()


def test_service_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/bin/sh\necho "cannot run $*" >&2\nexit 1\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    said = r"(?s)it said:\ncannot run -m npugrad_server serve .*--devices nosuch:0"
    with pytest.raises(RuntimeError, match=said), local_service(*SMALL, "--devices", "nosuch:0"):
        pytest.fail("expected no service")
