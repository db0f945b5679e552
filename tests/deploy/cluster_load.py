"""Load from within a cluster: ``cluster_load.py TARGET AUTHORITY``, with nothing but the client.

Callers make calls until they are told to end by SIGTERM. Every second, and at the end, a line of JSON says
how many have ended, how many of them failed, and what those were told.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from npugrad import get_operator
from npugrad_client import Client, NpugradError, Tls

CALLERS, CALL_S, LINE_S = 4, 60.0, 1.0


def main() -> None:
    target, authority = sys.argv[1:]
    is_over, counts, failed = threading.Event(), Counter[str](), Counter[str]()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    record = get_operator("group_norm_backward")
    built = record.build()
    call: dict[str, Any] = {**record.make_inputs(built, np.random.default_rng(0)), **built.attrs}

    def work(client: Client) -> None:
        while not is_over.is_set():
            try:
                client.group_norm_backward(**call)
            except NpugradError as error:
                failed[f"{type(error).__name__}: {error}"] += 1
            counts["calls"] += 1

    def tell() -> None:
        print(
            json.dumps({"calls": counts["calls"], "failed": failed.total(), "told": dict(failed)}), flush=True
        )

    with (
        Client(target, timeout_s=CALL_S, tls=Tls(ca=authority)) as client,
        ThreadPoolExecutor(CALLERS) as callers,
    ):
        for _ in range(CALLERS):
            callers.submit(work, client)
        try:
            while not is_over.wait(LINE_S):
                tell()
        finally:  # also where nobody reads any more
            is_over.set()
    tell()


if __name__ == "__main__":
    main()
