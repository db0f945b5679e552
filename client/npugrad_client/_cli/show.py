"""Tables for people: servers, operators, verdicts and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console

    from npugrad.call import ExecutionInfo
    from npugrad.spec import Verdict
    from npugrad_client import OperatorInfo, ServerInfo


def bytes_text(count: int) -> str:
    """Bytes for a person, such as ``1.5 GiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def server(console: Console, target: str, info: ServerInfo) -> None:
    """Prints a server's description."""
    state = "draining" if info.draining else "serving"
    console.print(
        f"npugrad {info.version} at {target}, {state} for {info.uptime_s:.0f} s, product {info.product}"
    )
    devices = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("device", "state", "backend", "restarts", "description"):
        devices.add_column(name)
    for device in info.devices:
        backend = device.backend + (" SIMULATED" if device.simulated else "")
        note = f"{device.description} {device.reason}".strip()
        devices.add_row(device.name, device.state, backend, str(device.restarts), note)
    console.print(devices)
    limits = info.limits
    operands = f"{bytes_text(info.input_arena_used_bytes)} of {bytes_text(limits.input_arena_bytes)}"
    results = f"{bytes_text(info.output_arena_used_bytes)} of {bytes_text(limits.output_arena_bytes)}"
    console.print(
        f"memory in use: operands {operands}, results {results} per device; "
        f"queue: {info.queue_depth} of {limits.max_queue_depth}; accepted so far: {info.accepted_calls}",
        soft_wrap=True,
    )
    console.print(
        "versions: " + ", ".join(f"{k} {v}" for k, v in sorted(info.versions.items())), soft_wrap=True
    )


def operators(console: Console, listed: tuple[OperatorInfo, ...]) -> None:
    """Prints the operators a server has."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("operator", "aclnn function", "supported", "dtypes", "constraints", "CANN"):
        table.add_column(name)
    for operator in listed:
        tensors = [p for p in operator.parameters if p.role == "input"]
        dtypes = ", ".join(tensors[0].dtypes) if tensors else ""
        table.add_row(
            operator.name,
            operator.aclnn_name,
            "yes" if operator.supported else "no",
            dtypes,
            str(len(operator.constraints)),
            operator.min_cann,
        )
    console.print(table)


def verdict(console: Console, operator: str, result: Verdict) -> None:
    """Prints what a validation found."""
    if not result.violations:
        outputs = ", ".join(f"{n} {'masked out' if m is None else m}" for n, m in result.outputs.items())
        console.print(f"{operator}: status 0, legal; outputs: {outputs}", soft_wrap=True, markup=False)
        return
    count = len(result.violations)
    console.print(f"{operator}: status {result.status}, {count} constraint{'s' * (count > 1)} violated")
    for violation in result.violations:
        console.print(
            f"  {violation.code} {violation.id}: {violation.message(operator)}", soft_wrap=True, markup=False
        )
        console.print(f"      {violation.text}", soft_wrap=True, markup=False, style="dim")


def results(console: Console, arrays: dict[str, npt.NDArray[Any] | None], info: ExecutionInfo) -> None:
    """Prints shapes of results and what produced them."""
    for name, array in arrays.items():
        text = "masked out" if array is None else f"{array.dtype}{list(array.shape)}"
        console.print(f"{name}: {text}", markup=False)
    simulated = ", SIMULATED" if info.simulated else ""
    console.print(
        f"on {info.device} ({info.backend}{simulated}) for {info.product}: queued {info.queued_s:.4f} s, "
        f"copy in {info.copy_in_s:.4f} s, run {info.run_s:.4f} s, copy out {info.copy_out_s:.4f} s",
        soft_wrap=True,
    )
