"""The exit statuses of `npugrad bench`, and what its help says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad_client.bench.capacity import Capacity

FAILED, USAGE, MISSED, INVALID, INTERRUPTED, DIED, GIVEN_UP = 1, 2, 3, 4, 5, 6, 130

STATUSES: Mapping[int, str] = {
    0: "done; objectives met",
    FAILED: "no answers, or calls failed and no objective allows failures",
    USAGE: "wrong usage",
    MISSED: "an objective was missed",
    INVALID: "no verdict: the client was the bottleneck, an objective had too few calls to be judged, or a "
    "search did not converge",
    INTERRUPTED: "interrupted, by Ctrl-C or SIGTERM",
    DIED: "died: the first call failed, or a process of the load test ended",
    GIVEN_UP: "stopped at once by a second interrupt",
}
OF_COMPARE: Mapping[int, str] = {
    0: "no difference, or faster",
    FAILED: "failed",
    USAGE: "wrong usage, runs of different scenarios, a flawed run, or one with too few windows",
    MISSED: "slower, or more errors",
    INVALID: "too short or too unsteady to tell",
}
_VERBATIM = "\b\n"
"""Makes the command-line library keep the lines of a paragraph."""
_WRITTEN = (
    "Requested reports are written whatever the status, except after wrong usage. After 4, 5, 6 and "
    "130 they say what happened. If the client was the bottleneck, and after 5, 6 and 130, they count no "
    "objective as met, and are refused by `compare`."
)
_EXAMPLES = (
    f"{_VERBATIM}Examples:\n"
    "npugrad bench --operator layer_norm_backward --size large --rate 50\n"
    "npugrad bench --size n=8,c=320,hxw=4096,group=32 --dtype bfloat16\n"
    "npugrad bench --scenario detection-decoder --find-capacity --slo p99=100ms"
)


def _listed(statuses: Mapping[int, str]) -> str:
    return _VERBATIM + "\n".join(f"Exit status {status}: {told}" for status, told in statuses.items())


HELP = "\n\n".join(
    (
        "Measure a server, find its capacity, compare two measurements.",
        "With --rate, calls are sent on a schedule, however long answers take, and latency counts from the "
        "scheduled start. With --concurrency, each of N callers waits for its answer before it sends again.",
        _EXAMPLES,
        _listed(STATUSES),
        _WRITTEN,
    )
)
COMPARE_HELP = "\n\n".join(("Say whether the second run differs from the first.", _listed(OF_COMPARE)))


def capacity_status(found: Capacity) -> int:
    """Exit status of a search: its finding counts only if the search settled."""
    if found.died or found.is_interrupted:
        return DIED if found.died else INTERRUPTED
    if found.is_client_limited or not found.is_settled:
        return INVALID
    return 0 if found.rate else MISSED
