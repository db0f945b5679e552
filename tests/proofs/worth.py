"""Shows what `policy="faster"` costs, and that `npugrad advise` is right: `make prove-advise`.

With a server on the same machine: backward passes of a VAE run in turn here, with all sent and with
``policy="faster"``, once that has learned; then each model's operators as `advise` predicts them, before,
against what `remote` takes to send them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from tests.fix_server import run_server
from tests.proofs import worth_script

from npugrad_client import Client
from npugrad_client._costs import TRIALS
from npugrad_client.torch import Summary, remote

_STEPS_TO_LEARN = 2 * TRIALS + 2
_STEP_GOAL, _ADVICE_GOAL = 1.05, 0.30


def _timed(loss: Callable[[], Any], around: AbstractContextManager[Any]) -> tuple[float, float]:
    """Seconds of one step, and of its backward pass alone."""
    started = time.perf_counter()
    found = loss()
    between = time.perf_counter()
    with around:
        found.backward()
    ended = time.perf_counter()
    return ended - started, ended - between


def steps(client: Client, rounds: int) -> None:
    """Prints what a step of a VAE takes each way, in turn: each has its share of a bad time."""
    title, loss = worth_script.make("vae")
    ways: dict[str, Any] = {
        "local": nullcontext(),
        "sent": remote(client),
        "faster": remote(client, policy="faster"),
    }
    for _ in range(_STEPS_TO_LEARN):
        _timed(loss, ways["faster"])
    learned = ways["faster"].summary()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in ([*ways] * 2)[number % 3 : number % 3 + 3]:
            found[name].append(_timed(loss, ways[name]))
    print(f"\n{title}, {rounds} rounds: seconds of a step and of its backward pass, median and fastest")
    for name, times in found.items():
        ratios = [one[0] / other[0] for one, other in zip(times, found["local"], strict=True)]
        figures = " ".join(
            f"{pick(column):8.3f}" for column in zip(*times, strict=True) for pick in (median, min)
        )
        print(f"{name:<8}{figures}; step / local, median of the rounds {median(ratios):.3f}")
    after = ways["faster"].summary()
    print(f"faster: sent {learned.sent} of {_calls(learned)} calls while it learned", end=", ")
    print(f"then {after.sent - learned.sent} of {_calls(after) - _calls(learned)}")
    for pick in (median, min):
        ratio = pick(step for step, _ in found["faster"]) / pick(step for step, _ in found["local"])
        verdict = "reached" if ratio <= _STEP_GOAL else "MISSED"
        print(f"faster / local by {pick.__name__}: {ratio:.3f}; goal: <= {_STEP_GOAL}: {verdict}")
    print(f"\n{after}")


def _calls(summary: Summary) -> int:
    return summary.sent + summary.local


def advice(name: str, client: Client, address: str, rounds: int) -> None:
    """Prints what `advise` predicts of each operator, and what sending it then takes."""
    predicted = _predicted(name, address)
    title, loss = worth_script.make(name)
    way = remote(client, min_bytes=0)
    for _ in range(2):
        _timed(loss, way)
    warm = _measured(way.summary())
    for _ in range(rounds):
        _timed(loss, way)
    print(f"\nadvise on {title}: seconds of a backward pass in each operator when it is sent")
    for operator, seconds in _measured(way.summary()).items():
        measured_s = (seconds - warm[operator]) / rounds
        error = predicted[operator] / measured_s - 1
        verdict = "reached" if abs(error) <= _ADVICE_GOAL else "MISSED"
        print(f"{operator:<26} predicted {predicted[operator]:.4f}, measured {measured_s:.4f}: {error:+.0%}; "
              f"goal: within {_ADVICE_GOAL:.0%}: {verdict}")  # fmt: skip


def _predicted(name: str, address: str) -> dict[str, float]:
    script = Path(worth_script.__file__)
    command = [sys.executable, "-m", "npugrad_client.cli", "advise", "--json", "--target", address]
    done = subprocess.run([*command, str(script), name], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = {}
    for row in json.loads(done.stdout)["rows"]:
        found[row["operator"]] = found.get(row["operator"], 0.0) + row["calls"] * row["remote_s"]
    return found


def _measured(summary: Summary) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in summary.rows:
        if row.is_sent:
            found[row.operator] = found.get(row.operator, 0.0) + row.seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    rounds = parser.parse_args().rounds
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; the server is on this machine"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        run_server(Path(folder) / "server.log") as server,
        Client(server.address, timeout_s=120) as client,
    ):
        for name in ("vae", "warp"):
            advice(name, client, server.address, rounds)
        steps(client, rounds)


if __name__ == "__main__":
    main()
