"""Two servers, one of which is killed under load: no gradient is lost or wrong.

    python client/examples/several_servers.py

Starts both on loopback, calls them from several threads, kills one half-way with SIGKILL, and reports how
many calls were sent again. With `--targets host1:50051 host2:50051` it calls running servers and kills none:
kill one yourself. Needs the server package for the servers it starts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

N, C, SIDE, GROUPS = 2, 16, 32, 4


def call(seed: int) -> dict[str, Any]:
    """Arguments of a group normalisation whose grad_beta is the sum of grad_out, (C,)."""
    made = np.random.default_rng(seed)
    return {
        "grad_out": made.standard_normal((N, C, SIDE, SIDE), dtype=np.float32),
        "input": made.standard_normal((N, C, SIDE, SIDE), dtype=np.float32),
        "mean": np.zeros((N, GROUPS), np.float32),
        "rstd": np.ones((N, GROUPS), np.float32),
        "n": N,
        "c": C,
        "hxw": SIDE * SIDE,
        "group": GROUPS,
        "output_mask": (True, True, True),
    }


def is_right(seed: int, grads: Any) -> bool:
    """Whether grad_beta is that of the call with this seed."""
    expected = call(seed)["grad_out"].sum(axis=(0, 2, 3), dtype=np.float64)
    return bool(np.allclose(grads.grad_beta, expected, atol=1e-3))


@contextmanager
def started_server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a server on a free loopback port; yields it and its address, and ends it with the block."""
    command = [sys.executable, "-m", "npugrad_server", "serve", "--listen", "127.0.0.1:0"]
    command += ["--devices", "cpu:0", "--metrics-listen", "", "--prefault-bytes", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        with process.stdout:
            ready = next((line for line in process.stdout if line.startswith("listening on ")), None)
            if ready is None:
                raise RuntimeError("the server did not start")
            yield process, ready.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(30)


def load(targets: list[str], number: int, victim: subprocess.Popen[str] | None) -> tuple[int, int]:
    """Makes the calls, 8 at a time, kills the victim half-way; returns how many were right and resent."""
    half = threading.Semaphore(0)

    def one(seed: int) -> tuple[bool, int]:
        grads = client.group_norm_backward(**call(seed))
        half.release()
        return is_right(seed, grads), grads.info.tries

    def kill() -> None:
        for _ in range(number // 2):
            half.acquire()
        if victim is not None:
            victim.kill()
            print(f"killed {targets[0]} after {number // 2} answers")

    with Client(targets, timeout_s=60.0) as client:
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        found = client.run_many(one, ({"seed": seed} for seed in range(number)), concurrency=8)
        killer.join()
    return sum(right for right, _ in found), sum(tries > 1 for _, tries in found)


def main() -> int:
    """Command line; the exit status tells whether every call was answered correctly."""
    parser = argparse.ArgumentParser(description="Two servers, one of which is killed under load.")
    parser.add_argument("--targets", nargs="+", default=[], help="addresses of running servers")
    parser.add_argument("--calls", type=int, default=400, help="calls in all")
    options = parser.parse_args()
    with ExitStack() as stack:
        targets, victim = options.targets, None
        if not targets:
            (victim, first), (_, second) = (stack.enter_context(started_server()) for _ in range(2))
            targets = [first, second]
        right, again = load(targets, options.calls, victim)
    print(f"{right} of {options.calls} right, {again} sent again")
    return 0 if right == options.calls else 1


if __name__ == "__main__":
    sys.exit(main())
