"""Shows that a call may say nothing for minutes: `make prove-long-call`.

One unary and one streamed call of 420 s at once, on simulated devices, through the client with its own
settings. It pings once a minute, which a server with grpc's defaults takes for abuse from the fourth time on.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.harness import STREAMED, UNARY
from tests.fix_server import run_server
from tests.proofs.callers import arguments
from tests.proofs.proof import run, verdict

from npugrad.errors import NpugradError
from npugrad_client import Client


class Held(NamedTuple):
    seconds: float
    told: str

    def __str__(self) -> str:
        return f"{self.told or 'answered'} after {self.seconds:.1f} s"


def hold(address: str, seconds: float, stream_from_bytes: int) -> Held:
    started_s, told = time.monotonic(), ""
    with Client(address, timeout_s=seconds + 60, retry=None, stream_from_bytes=stream_from_bytes) as client:
        try:
            client.group_norm_backward(**arguments())
        except NpugradError as error:
            told = f"FAILED with {error}"
    return Held(time.monotonic() - started_s, told)


def main(given: Any, folder: Path) -> bool:
    devices, flags = f"test:2?ms={given.seconds * 1000:g}", ("--run-limit-s", f"{given.seconds + 60:g}")
    with run_server(folder / "server.log", *flags, devices=devices) as server, ThreadPoolExecutor(2) as pool:
        unary, streamed = pool.map(partial(hold, server.address, given.seconds), (UNARY, STREAMED))
    line = f"long call: {given.seconds:g} s, simulated devices: unary {unary}; streamed {streamed}"
    return verdict(line, not unary.told and not streamed.told)


if __name__ == "__main__":
    run(main, __doc__, seconds=(420.0, "length of the calls"))
