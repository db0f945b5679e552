"""Builds the log line of a call, on the thread that writes the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad.errors import NpugradError, OperatorError
from npugrad.timeline import seconds_by_stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npugrad.call import ExecutionInfo
    from npugrad.meta import CallMeta
    from npugrad.timeline import Mark

_RPC_FIELDS = ("request_id", "method", "peer", "tenant", "status", "reason")


def call_fields(
    rpc: tuple[str, str, str, str, str, str, float],
    call: tuple[str, CallMeta | None, int, int] | None,
    info: ExecutionInfo | None,
    error: Mapping[str, Any] | None,
    marks: Sequence[Mark],
    span: tuple[str, str] | None,
) -> dict[str, Any]:
    """Fields of a call's log line."""
    *named, seconds = rpc
    line: dict[str, Any] = dict(zip(_RPC_FIELDS, named, strict=True))
    line["seconds"] = round(seconds, 6)
    if call is not None:
        operator, described, received_bytes, sent_bytes = call
        line |= {"operator": operator, "operands": "" if described is None else described.summary}
        line |= {"received_bytes": received_bytes, "sent_bytes": sent_bytes}
    if info is not None:
        line |= {"device": info.device, "backend": info.backend, "attempts": info.attempts}
        line |= {"queued_s": round(info.queued_s, 6), "run_s": round(info.run_s, 6)}
        if info.predicted_run_s:
            line["predicted_queued_s"] = round(info.predicted_wait_s, 6)
            line["predicted_run_s"] = round(info.predicted_run_s, 6)
    if len(marks) > 1:
        line["stages"] = {stage: round(seconds, 6) for stage, seconds in seconds_by_stage(marks).items()}
    if span is not None:
        line["trace_id"], line["span_id"] = span
    return line if error is None else {**line, **error}


def error_fields(error: NpugradError) -> dict[str, Any]:
    """Fields of an error in a log line."""
    found: dict[str, Any] = {"error": str(error)}
    if isinstance(error, OperatorError):
        found |= {"code": error.code, "constraint": error.constraint}
    return found
