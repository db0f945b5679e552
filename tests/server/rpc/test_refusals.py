"""Refusals in the log: one line for each kind, however many there are."""

from __future__ import annotations

import structlog

from npugrad_server.pool.tenant import Tenant
from npugrad_server.rpc.refusals import QUIET_S, RefusalLog

LISTED, STRANGERS = Tenant("a", shown="a"), [Tenant(f"ipv4:10.0.0.{n}") for n in range(50)]


def test_each_kind_has_one_line_at_once_and_one_a_while_later() -> None:
    with structlog.testing.capture_logs() as lines:
        log = RefusalLog()
        for n in range(100):
            log.note(LISTED, "QUOTA_EXCEEDED", f"error {n}", 10.0 + n * QUIET_S / 100)
            log.note(LISTED, "QUEUE_FULL", "full", 10.0)
        for tenant in STRANGERS:
            log.note(tenant, "QUEUE_FULL", "full", 10.0)
        assert [(line["tenant"], line["reason"], line["error"]) for line in lines] == [
            ("a", "QUOTA_EXCEEDED", "error 0"),
            ("a", "QUEUE_FULL", "full"),
            ("ipv4:10.0.0.0", "QUEUE_FULL", "full"),
        ]
        log.note(LISTED, "QUOTA_EXCEEDED", "again", 10.0 + QUIET_S)
    assert {line["event"] for line in lines} == {"refused"}
    assert {line["log_level"] for line in lines} == {"warning"}
    assert (lines[-1]["error"], lines[-1]["earlier_count"]) == ("again", 99)
