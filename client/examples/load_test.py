"""A load test with objectives, such as a pipeline runs before a release.

It measures the same calls three times: with operands sent over the network, with operands that the server
generates, so that almost nothing is sent, and as the first time, to compare the two. Start a server, then

    python client/examples/load_test.py --target localhost:50051 --rate 20 --slo p99=250ms,errors=0.1%

Exits with the status of `npugrad bench`: 0 if the objectives were met, 1 if calls failed, 3 if an objective
was missed or the last measurement was slower than the first, 4 if nothing can be concluded, 6 if there is no
server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = [sys.executable, "-m", "npugrad_client.cli", "bench"]
CALLS = ["--operator", "grid_sampler_2d_backward", "--size", "medium"]


def bench(*arguments: str) -> int:
    """Runs `npugrad bench`, which prints its report, and returns its exit status."""
    print("\n$ npugrad bench", *arguments, flush=True)
    return subprocess.run([*BENCH, *arguments], check=False).returncode


def main() -> int:
    """Command line; the exit status is that of the first command that fails."""
    parser = argparse.ArgumentParser(description="Runs a load test with objectives.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    parser.add_argument("--rate", default="20", help="calls a second")
    parser.add_argument("--duration", default="10s", help="duration of each measurement")
    parser.add_argument("--slo", default="p99=250ms,errors=0.1%", help="objectives")
    parser.add_argument(
        "--out", type=Path, default=Path("build/load-test"), help="folder for the HTML report"
    )
    parser.add_argument(
        "--shared", action="store_true", help="accept results although the machine is busy with other work"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    load = [*CALLS, "--rate", options.rate, "--duration", options.duration, "--warm-up", "1s"]
    load += ["--target", options.target, "--slo", options.slo]
    if options.shared:
        load.append("--allow-client-bound")
    with tempfile.TemporaryDirectory() as folder:
        before, after = (str(Path(folder) / name) for name in ("before.json", "after.json"))
        page = str(options.out / "report.html")
        return (
            bench(*load, "--json", before, "--html", page)
            or bench(*load, "--inputs", "recipe", "--digest")
            or bench(*load, "--json", after)
            or bench("compare", before, after, *(["--allow-flawed"] if options.shared else []))
        )


if __name__ == "__main__":
    sys.exit(main())
