"""A load test with promises: the kind of step that a pipeline runs before a release.

Three measurements of the same calls: with operands that travel; with operands that the server makes itself,
so that the network carries next to nothing; and again the first one, held against it. Start a server, then

    python client/examples/load_test.py --target localhost:50051 --rate 20 --slo p99=250ms,errors=0.1%

Ends with the status of `npugrad bench`: 0 when the promises were kept, 1 when calls failed, 3 when one was
broken or the second measurement was slower, 4 when there was nothing to be told, 6 when there is no server.
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
    """Command line; the exit status is that of the first measurement that is not well."""
    parser = argparse.ArgumentParser(description="A load test against promises.")
    parser.add_argument("--target", default="localhost:50051", help="address of the server")
    parser.add_argument("--rate", default="20", help="calls a second")
    parser.add_argument("--duration", default="10s", help="of each measurement")
    parser.add_argument("--slo", default="p99=250ms,errors=0.1%", help="what is promised")
    parser.add_argument("--out", type=Path, default=Path("build/load-test"), help="folder for the page")
    parser.add_argument("--shared", action="store_true", help="the machine is busy with other things too")
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
