"""Call every operator over loopback, unary and streamed, with whatever versions are installed.

``make check-floor`` runs this with the oldest versions that ``pyproject.toml`` allows, so that a floor is
a fact and not a hope. It uses nothing but what the extra ``server`` brings.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from npugrad import OPERATORS, OpRecord, Product
from npugrad.meta import CallMeta
from npugrad.tolerance import compare
from npugrad_client import Client

Arrays = dict[str, npt.NDArray[Any] | None]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
SMALL_SERVER = ["--devices=cpu:0", "--metrics-listen=", "--prefault-bytes=0", "--log-level=warning"]
SHOWN = ("grpcio", "protobuf", "numpy", "ml_dtypes", "typer", "pydantic-settings", "structlog")


def check_operator(record: OpRecord, clients: tuple[Client, ...]) -> int:
    """Run each sample of one operator on each client and compare with the float64 reference.

    Args:
        record: The operator's record.
        clients: Clients of the server, which differ in how they send.

    Returns:
        How many calls were made.

    Raises:
        SystemExit: A result is outside its tolerance.
    """
    calls = 0
    for sample in record.samples(Product.ATLAS_A2):
        inputs = record.make_inputs(sample.call, np.random.default_rng(0))
        expected = reference(record, sample.call, inputs)
        for client in clients:
            answer = getattr(client, record.name)(**inputs, **sample.call.attrs, timeout_s=CALL_TIMEOUT_S)
            for name, golden in expected.items():
                extra = record.extra_tolerance(inputs, sample.call.attrs, name)
                found = compare(golden, getattr(answer, name), extra)
                if not found.ok:
                    raise SystemExit(f"{record.name}: sample {sample.name}: {name}: {found}")
            calls += 1
    return calls


def reference(record: OpRecord, call: CallMeta, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return the wanted outputs of a call, by name, as the local reference computes them in float64."""
    outputs = {name: np.zeros(meta.shape) for name, meta in record.infer(call).items() if meta is not None}
    record.reference(inputs, call.attrs, outputs)
    return outputs


def main() -> None:
    """Start a server on a unix socket, call it, stop it.

    Raises:
        SystemExit: A command line does not answer, the server does not start, a result differs, or the
            server does not end with status 0.
    """
    print("versions: " + ", ".join(f"{name} {version(name)}" for name in SHOWN))
    for package in ("npugrad_server", "npugrad_client"):
        program = f"from {package}.cli import main; main()"
        subprocess.run([sys.executable, "-c", program, "--help"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        target = f"unix:{Path(folder) / 'socket'}"
        command = [sys.executable, "-m", "npugrad_server", "serve", "--listen", target, *SMALL_SERVER]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                calls = call_all(target)
            finally:
                server.terminate()
                status = server.wait(STOP_TIMEOUT_S)
    if status != 0:
        raise SystemExit(f"floor_call: the server ended with status {status}; expected 0")
    print(f"floor_call: {calls} calls of {len(OPERATORS)} operators, all within tolerance of the reference")


def call_all(target: str) -> int:
    """Call every operator of the server at ``target`` and return how many calls were made."""
    with grpc.insecure_channel(target) as channel:
        grpc.channel_ready_future(channel).result(START_TIMEOUT_S)
    with Client(target) as unary, Client(target, stream_from_bytes=1) as streamed:
        return sum(check_operator(record, (unary, streamed)) for record in OPERATORS.values())


if __name__ == "__main__":
    main()
