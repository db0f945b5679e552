"""`npugrad advise`: runs a script and prints which operators of its backward passes are worth sending."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer looks at the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from npugrad_client._cli.connection import (
    AT_ONCE,
    DEFAULT_TARGETS,
    Authority,
    Certificate,
    Encrypted,
    Key,
    Targets,
    connect,
    tls,
)
from npugrad_client._cli.terminal import FileError, Timeout, fail, out, reporting

if TYPE_CHECKING:
    from npugrad_client import Client, ServerInfo
    from npugrad_client._advice import Advice, KindAdvice

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Arguments after the script belong to the script."""


def advise(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python program that trains.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Arguments of the script.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="End the script after this many backward passes; 0: never.")
    ] = 6,
    target: Targets = DEFAULT_TARGETS,
    encrypted: Encrypted = False,
    tls_ca: Authority = None,
    tls_certificate: Certificate = None,
    tls_key: Key = None,
    timeout: Timeout = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for scripts; what the script prints goes to stderr.")
    ] = False,
) -> None:
    """Run a PyTorch script and report which operators of its backward passes are worth offloading.

    A few calls of each kind are also sent, to time them; the gradients are PyTorch's.
    The first backward pass is a warm-up; from the third on, every second one also
    sends its calls.

    Exit status 0: the advice was printed
    Exit status 1: the script or the server failed, or there was no backward pass
    Exit status 2: wrong usage
    """
    with reporting():
        if not script.is_file():
            raise FileError(f"SCRIPT: there is no file {str(script)!r}")
        how = tls(encrypted, tls_ca, tls_certificate, tls_key)
        with connect(target, timeout, how, AT_ONCE) as client:
            server = client.server_info()  # without a server, fail before running the script
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                found = _measured(client, script, arguments or [], steps)
        if as_json:
            out().print_json(json.dumps(_as_dict(found)))
        else:
            _show(script, client.target, server, found)


def _measured(client: Client, script: Path, arguments: list[str], steps: int) -> Advice:
    try:
        from npugrad_client.torch import _advise  # here, because it needs the extra `torch`
    except ImportError as error:
        install = "pip install '.[torch]' in a checkout of npugrad"
        raise FileError(f"npugrad advise needs PyTorch ({error}): {install}") from None
    try:
        return _advise.advise(client, script, arguments, steps)
    except _advise.ScriptError as error:
        fail(str(error))


def _as_dict(advice: Advice) -> dict[str, Any]:
    rows = [{**asdict(row), "send": row.send, "won_s": row.won_s} for row in advice.rows]
    sums = {"known_s": advice.known_s, "all_sent_s": advice.all_sent_s, "advised_s": advice.advised_s}
    return {**asdict(advice), **sums, "rows": rows}


def _show(script: Path, target: str, server: ServerInfo, advice: Advice) -> None:
    devices = ", ".join(sorted({d.backend + " (simulated)" * d.simulated for d in server.devices}))
    passes = f"{advice.passes} backward pass{'es' * (advice.passes > 1)}"
    warm = "after one to warm up" if advice.is_warm else "the first one, which includes warming up"
    out().print(f"{script}: {passes}, {warm}; server {target}: {server.product}, {devices}", soft_wrap=True)
    if advice.rows:
        _show_rows(advice.rows)
    for line in _sentences(advice):
        out().print(line, soft_wrap=True)


def _show_rows(rows: tuple[KindAdvice, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("operator", "kind"):
        table.add_column(name, overflow="fold")  # on a narrow terminal these two wrap, never a number
    for name in ("calls", "MiB", "ms here", "ms sent", "saved ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("advice")
    for row in rows:
        sent = "-" if row.remote_s is None else f"{row.remote_s * 1e3:.2f}"
        won = "-" if row.remote_s is None else f"{row.won_s * 1e3:.1f}"
        numbers = (f"{row.calls:g}", f"{row.bytes / 2**20:.2f}", f"{row.local_s * 1e3:.2f}", sent, won)
        table.add_row(row.operator, row.kind, *numbers, row.why or ("send" if row.send else "keep here"))
    out().print(table)


def _sentences(advice: Advice) -> list[str]:
    """The conclusions from the table, in words."""
    step = "" if advice.step_s is None else f"; a step takes {_ms(advice.step_s)}"
    known = f"{_ms(advice.known_s)} of it in operators that the service offers"
    lines = [f"A backward pass takes {_ms(advice.backward_s)} here, {known}{step}."]
    if not any(row.remote_s is not None for row in advice.rows):
        return [*lines, "There is nothing to send."]
    lines.append(f"With all of these sent, it would take about {_ms(advice.all_sent_s)}.")
    sent = [row for row in advice.rows if row.send]
    if not sent:
        return [*lines, "Send nothing: every operator is faster here."]
    from npugrad_client._policy import MIN_BYTES

    least = min(row.bytes for row in sent)
    small = ", min_bytes=0" if least < MIN_BYTES else ""
    lines.append(
        f"Sending only those that save time, it would take about {_ms(advice.advised_s)}: "
        f'remote(client, policy="faster"{small}).'
    )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
