"""Shows that a call may say nothing for minutes: `make prove-long-call`.

One unary and one streamed call of 420 s at once, on simulated devices, through the client with its own
settings. It pings once a minute, which a server with grpc's defaults takes for abuse from the fourth time on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.calls import fill
from tests.e2e.harness import STREAMED, UNARY
from tests.fix_server import run_server
from tests.operators import GROUP_NORM

from npugrad.errors import NpugradError
from npugrad_client import Client


def hold(address: str, seconds: float, stream_from_bytes: int) -> str:
    """Makes one call that takes so long; says what became of it."""
    call = fill(GROUP_NORM, GROUP_NORM.build())
    started_s = time.monotonic()
    with Client(address, timeout_s=seconds + 60, retry=None, stream_from_bytes=stream_from_bytes) as client:
        try:
            getattr(client, call.record.name)(**call.arrays, **call.call.attrs)
        except NpugradError as error:
            return f"FAILED after {time.monotonic() - started_s:.1f} s: {error}"
    return f"answered after {time.monotonic() - started_s:.1f} s"


def main() -> int:
    """Runs both calls and prints one line; exit code 0 if both were answered."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--seconds", type=float, default=420.0, help="length of the calls; default 420")
    seconds = options.parse_args().seconds
    devices = f"test:2?ms={seconds * 1000:g}"
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--run-limit-s", f"{seconds + 60:g}")
        with run_server(Path(folder) / "server.log", *flags, devices=devices) as server:
            with ThreadPoolExecutor(2) as pool:
                unary = pool.submit(hold, server.address, seconds, UNARY)
                streamed = pool.submit(hold, server.address, seconds, STREAMED)
            found = unary.result(), streamed.result()
    print(f"long call: {seconds:g} s, simulated devices: unary {found[0]}; streamed {found[1]}")
    return 0 if all(text.startswith("answered") for text in found) else 1


if __name__ == "__main__":
    sys.exit(main())
