"""`make prove-calm`: runs a command while its whole process tree stands still again and again.

As a machine does whose processors are taken away: every 14 s all its processes are stopped for 0.3 to 2.5 s.
Ends with the exit code of the command; the last line says how often it stood still.
"""

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_EVERY_S, _SHORTEST_S, _LONGEST_S = 14.0, 0.3, 2.5


def stop(root: psutil.Process) -> list[psutil.Process]:
    """Stops a process and all below it; returns those that ran, as tests stop some themselves."""
    stopped: dict[int, psutil.Process] = {}
    while True:  # what is forked meanwhile has to be found
        found = [p for p in [root, *root.children(recursive=True)] if p.pid not in stopped]
        before = len(stopped)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    process.send_signal(signal.SIGSTOP)
                    stopped[process.pid] = process
        if len(stopped) == before:
            return list(stopped.values())


def _ended(pid: int, limit_s: float) -> int | None:
    """The exit code of a process that ends in time; takes up the ends of those below it as well."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                if done[0] == pid:
                    return os.waitstatus_to_exitcode(done[1])
        time.sleep(0.1)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.stalls", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="of the lengths of the stalls")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    # What loses its parent becomes a child of this process, so that the tree stays whole.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng, stalls, stalled_s, most = random.Random(arguments.seed), 0, 0.0, 0
    pid = os.posix_spawnp(arguments.command[0], arguments.command, os.environ)
    own = psutil.Process()
    while (code := _ended(pid, _EVERY_S)) is None:
        processes = [p for child in own.children() for p in stop(child)]
        stall_s = rng.uniform(_SHORTEST_S, _LONGEST_S)
        time.sleep(stall_s)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        stalls, stalled_s, most = stalls + 1, stalled_s + stall_s, max(most, len(processes))
    print(f"exit code {code}; stood still {stalls} times, {stalled_s:.0f} s in all, up to {most} processes")
    return code


if __name__ == "__main__":
    sys.exit(main())
