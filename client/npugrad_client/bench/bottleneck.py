"""Whether a run measured the client instead of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad_client.bench.sketch import count_for
from npugrad_client.bench.units import format_seconds, format_share

if TYPE_CHECKING:
    from npugrad_client.bench.result import Result

_MEDIAN_SHARE, _TAIL_SHARE = 0.1, 0.25
_SLACK_S = 0.002
"""Lateness below this is normal everywhere."""
_LOOP_SHARE = 0.9


def client_bound(result: Result) -> tuple[str, ...]:
    """Returns reasons to think that the client, not the server, set the figures; empty if there are none.

    A late start is part of a call's latency: lateness may be a tenth of the latency at the median, and a
    quarter at the 99th percentile; without answers there is nothing to compare it with. Nor may a worker's
    event loop be busy nearly all the time.
    """
    reasons = []
    if result.record.unsent_s:
        reasons.append(
            f"not all calls were sent: a worker was {format_seconds(result.record.unsent_s)} behind its "
            "schedule at the end"
        )
    for percentile, share in ((50.0, _MEDIAN_SHARE), (99.0, _TAIL_SHARE)) if result.answered else ():
        latency = result.record.latency.percentile_s(percentile)
        for what, late in (
            ("calls were sent", result.record.lateness),
            ("answers were read", result.record.loop_lag),
        ):
            late_s, limit_s = late.percentile_s(percentile), max(share * latency, _SLACK_S)
            if late_s > limit_s:
                where = f"at p{percentile:g}" if late.count >= count_for(percentile) else "at most"
                reasons.append(
                    f"{what} late: by {format_seconds(late_s)} {where} (limit: {format_seconds(limit_s)})"
                )
    for worker, cpu in enumerate(result.cpus):
        if cpu.loop_share > _LOOP_SHARE:
            reasons.append(
                f"the event loop of worker {worker} was busy {format_share(cpu.loop_share)} of the time "
                f"(limit: {format_share(_LOOP_SHARE)})"
            )
    return tuple(reasons)


ADVICE = "Use more --workers, send fewer or smaller calls, or run the client on its own machine."
