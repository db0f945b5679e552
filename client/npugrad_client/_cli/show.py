"""Human-readable output: servers, operators, verdicts and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from npugrad_client._attempt import bytes_text
from npugrad_client._cli import json_answers

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console

    from npugrad.call import ExecutionInfo
    from npugrad.validation import Verdict
    from npugrad_client import OperatorInfo, ServerInfo


def server(console: Console, target: str, info: ServerInfo) -> None:
    """Prints a server's description."""
    state = "draining" if info.draining else "serving"
    console.print(
        f"npugrad {info.version} at {target}, product {info.product}, {state} for {info.uptime_s:.0f} s",
        soft_wrap=True,
    )
    devices = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("device", "state", "backend", "restarts", "description"):
        devices.add_column(name, no_wrap=name != "description")
    for device in info.devices:
        backend = device.backend + (" (simulated)" if device.simulated else "")
        note = f"{device.description} {device.reason}".strip()
        devices.add_row(device.name, device.state, backend, str(device.restarts), note)
    console.print(devices)
    limits = info.limits
    operands = f"{bytes_text(info.input_arena_used_bytes)} of {bytes_text(limits.input_arena_bytes)}"
    results = f"{bytes_text(info.output_arena_used_bytes)} of {bytes_text(limits.output_arena_bytes)}"
    lines = {
        "memory in use": f"operands {operands}, results {results} per device",
        "queue": f"{info.queue_depth} of {limits.max_queue_depth} calls",
        "calls accepted so far": str(info.accepted_calls),
        "results compared": _compared(info.verify_sample),
        "checked by": f"the pages of CANN {info.cann}" if info.cann else "the pages of each operator",
        "operators": ", ".join(info.operators),
        "built on": ", ".join(f"{k} {v}" for k, v in sorted(info.versions.items())),
    }
    for name, text in lines.items():
        console.print(f"{name}: {text}", soft_wrap=True)


def _compared(sample: float | None) -> str:
    """Which results a server compares with the reference, in words."""
    if sample is None:
        return "of calls with verify; this server does not say whether of others"
    if sample:
        return f"of calls with verify, and of a fraction of {sample:g} of the others"
    return "NOT, but for calls with verify: a device that computes wrongly may go unnoticed (--verify-sample)"


def operators(console: Console, listed: tuple[OperatorInfo, ...], product: str) -> None:
    """Prints the operators a server has, as they are on a product."""
    for number, operator in enumerate(listed):
        if number:
            console.print()
        supported = "" if operator.supported else f", NOT on {_lacking(operator)}"
        console.print(f"{operator.name}: {operator.aclnn_name}{supported}", style="bold", soft_wrap=True)
        tensors = [p for p in operator.parameters if p.role == "input"]
        dtypes = ", ".join(tensors[0].dtypes if tensors else ()) or "none"
        for line in (
            operator.summary,
            f"types: {dtypes}; constraints on {product}: {len(operator.constraints)}; "
            f"oldest CANN: {operator.min_cann}",
            ", ".join(p.name for p in operator.parameters if p.role != "output")
            + " -> "
            + ", ".join(p.name for p in operator.parameters if p.role == "output"),
        ):
            console.print(f"  {line}", soft_wrap=True)


def operator(console: Console, found: OperatorInfo, product: str) -> None:
    """Prints one operator a server has, with the types of each parameter."""
    operators(console, (found,), product)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("parameter", "kind", "types here", "meaning"):
        table.add_column(name, no_wrap=name in ("parameter", "kind"))
    for param in found.parameters:
        kind = f"optional {param.role}" if param.optional else param.role
        table.add_row(param.name, kind, ", ".join(map(str, param.dtypes)), param.doc)
    console.print()
    console.print(table)
    console.print(
        f"Its constraints on all products: npugrad explain {found.name}", style="dim", soft_wrap=True
    )


def _lacking(operator: OperatorInfo) -> str:
    """Says what lacks an unsupported operator; its parameters have dtypes only if the product has it."""
    on_product = any(parameter.dtypes for parameter in operator.parameters)
    return "the server's devices; a call returns the reason" if on_product else "this product"


def verdict(console: Console, operator: str, result: Verdict) -> None:
    """Prints what a validation found."""
    if not result.violations:
        console.print(f"{operator}: status 0, legal; outputs:")
        for name, meta in result.outputs.items():
            console.print(f"  {name}: {'masked out' if meta is None else meta}", soft_wrap=True)
        predicted = (result.predicted_wait_s, "waiting"), (result.predicted_run_s, "running")
        told = [f"{seconds:.3g} s of {what}" for seconds, what in predicted if seconds is not None]
        if told:
            console.print(f"predicted now: {', '.join(told)}")
        return
    count = len(result.violations)
    console.print(f"{operator}: status {result.status}, {count} constraint{'s' * (count > 1)} violated:")
    for violation in result.violations:
        what = ", ".join(violation.operands)
        text = f"{what}: found {violation.found}; expected {violation.expected}"
        console.print(f"  {violation.code} {violation.id}: {text}", soft_wrap=True)
        source = f" ({violation.sources[0]})" if violation.sources else ""
        console.print(f"      {violation.text}{source}", soft_wrap=True, style="dim")


def results(console: Console, arrays: dict[str, npt.NDArray[Any] | None], info: ExecutionInfo) -> None:
    """Prints shapes and norms of results and what produced them."""
    for name, array in arrays.items():
        text = "masked out"
        if array is not None:
            text = f"{array.dtype}{list(array.shape)}, norm {json_answers.norm(array):.6g}"
        console.print(f"{name}: {text}", soft_wrap=True)
    simulated = ", simulated" if info.simulated else ""
    console.print(
        f"on {info.device} ({info.backend}{simulated}) for {info.product}: queued {info.queued_s:.4f} s, "
        f"copy in {info.copy_in_s:.4f} s, run {info.run_s:.4f} s, copy out {info.copy_out_s:.4f} s",
        soft_wrap=True,
    )
    for found in info.verified:
        console.print(f"verified: {found}", soft_wrap=True)
    if info.verification:
        console.print(f"verified: {info.verification}", soft_wrap=True)
