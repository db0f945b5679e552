"""Step 0: uses the device without torch, so that a failure of torch_npu does not hide everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npugrad_server.acceptance.step import Step
from npugrad_server.acceptance.trial import TrialFailed
from npugrad_server.backends.npu.trials.ladder import LEFT_OUT

if TYPE_CHECKING:
    from npugrad_server.acceptance.rig import Rig
    from npugrad_server.acceptance.step import StepLog

_OPERATOR = "run "
_MARGIN_S = 30.0
"""Seconds beyond the limits of all rungs in which the climbing process must end."""
_MOST_RUNGS = 20


def run(rig: Rig, out: StepLog) -> None:
    """Climbs in a separate process, and reports how far it came, however that process ended."""
    limit_s = rig.settings.rung_limit_s
    out.progress(0, 1, "the device without torch")
    with rig.trial("ladder") as trial:
        ended = "the process ended"
        try:
            order = {"device": rig.settings.index, "limit_s": limit_s}
            trial.run(order, timeout_s=_MOST_RUNGS * limit_s + _MARGIN_S)
        except TrialFailed as failure:
            ended = str(failure)
        finally:  # also after an interrupt
            lines = {line["rung"]: line for line in trial.lines}  # the last line of a rung counts
            out.keep("ladder", trial.results)
            _tell(out, lines, ended, limit_s)


def _tell(out: StepLog, lines: dict[str, dict[str, Any]], ended: str, limit_s: float) -> None:
    rows = []
    for name, line in lines.items():
        unfinished = f"started, but not done within {limit_s:g} s, or the process ended there; {ended}"
        found, seconds = line.get("found", unfinished), line.get("seconds")
        ok = line.get("ok", False)
        out.check(name, ok, "done", found)
        rows.append((name, "done" if ok else "FAILED", seconds, found))
    if not lines:
        out.check("the ladder begins", False, "a first rung", ended)
    elif "give back" in lines:
        ran = [name for name, line in lines.items() if _ran(name, line)]
        out.check("an operator gives a right result", bool(ran), "at least one", ", ".join(ran) or "none")
    out.table("Rungs", ("rung", "outcome", "took [s]", "found"), rows)


def _ran(name: str, line: dict[str, Any]) -> bool:
    return name.startswith(_OPERATOR) and line["ok"] and not line["found"].startswith(LEFT_OUT)


STEP = Step(
    0,
    "ladder",
    "Ladder",
    "CANN without torch, rung by rung: load, initialize, set the device, copy, compute, give back.",
    run,
    needs_device=False,
)
"""The step."""
