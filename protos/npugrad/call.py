"""Options and execution info of a call, independent of the wire format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from npugrad.representation import counted, html_table, in_lines, shortened

if TYPE_CHECKING:
    from npugrad.products import Product
    from npugrad.timeline import Recorded, Timeline

MAX_LABEL = 64
"""Maximum length of a label in characters."""
PRIORITIES = range(-100, 101)
"""Legal priorities of a call."""


@dataclass(frozen=True)
class CallOptions:
    """Options of a call.

    Attributes:
        deterministic: Request bitwise reproducible results.
        priority: -100 to 100; calls of higher priority leave the queue first.
        label: Name of the caller or experiment, at most 64 printable ASCII characters; a tenant's calls with
            different labels take turns.
        verify: Have the server recompute the call with the reference and fail if the result differs.
    """

    deterministic: bool = False
    priority: int = 0
    label: str = ""
    verify: bool = False

    def problem(self) -> tuple[str, str] | None:
        """Name of an invalid option and what is wrong with it; None if all are valid."""
        for name, is_of_type, wanted in (
            ("deterministic", _is_flag, "True or False"),
            ("priority", _is_integer, f"an integer from {PRIORITIES[0]} to {PRIORITIES[-1]}"),
            ("label", _is_text, f"text of at most {MAX_LABEL} printable ASCII characters"),
            ("verify", _is_flag, "True or False"),
        ):
            value = getattr(self, name)
            if not is_of_type(value):
                return name, f"found {repr(value)[:80]}; expected {wanted}"
        if self.priority not in PRIORITIES:
            return "priority", f"found {self.priority}; expected {PRIORITIES[0]} to {PRIORITIES[-1]}"
        if len(self.label) > MAX_LABEL or not (self.label.isascii() and self.label.isprintable()):
            return (
                "label",
                f"found {len(self.label)} characters; expected at most {MAX_LABEL} printable ASCII ones",
            )
        return None


def _is_flag(value: object) -> bool:
    return isinstance(value, (bool, np.bool_)) or (_is_integer(value) and value in (0, 1))


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True)
class VerifiedOutput:
    """Deviation of a verified output from the float64 reference.

    Example:
        >>> print(VerifiedOutput("grad_input", 1.5e-6, 2e-7, 0.03))
        grad_input: max absolute error 1.50e-06, max relative error 2.00e-07, 0.03 of the tolerance
        >>> [v.name for v in client.group_norm_backward(**call, verify=True).info.verified]
        ['grad_input', 'grad_gamma', 'grad_beta']

    Attributes:
        name: Name of the output.
        max_absolute_error: Largest absolute error over finite elements.
        max_relative_error: The same, relative to the largest absolute value of the reference.
        tolerance_used: Largest error as a fraction of the tolerance, over single elements and their mean; at
            most 1.
    """

    name: str
    max_absolute_error: float
    max_relative_error: float
    tolerance_used: float

    def __repr__(self) -> str:
        """The four attributes in their order."""
        errors = (self.max_absolute_error, self.max_relative_error, self.tolerance_used)
        return f"VerifiedOutput({self.name!r}, {', '.join(f'{error:.2g}' for error in errors)})"

    def __str__(self) -> str:
        """One-line description."""
        return (
            f"{self.name}: max absolute error {self.max_absolute_error:.2e}, max relative error "
            f"{self.max_relative_error:.2e}, {self.tolerance_used:.2g} of the tolerance"
        )


class VerifiedOutputs(tuple[VerifiedOutput, ...]):
    """Deviations of the verified outputs of a call, shown in lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Those of the tuple, two a line."""
        return in_lines("", map(repr, self))


@dataclass(frozen=True, repr=False)
class ExecutionInfo:
    """Where a result was computed and how long each stage took.

    Example:
        >>> info = client.group_norm_backward(**call).info
        >>> f"{info.device}: {info.run_s * 1e3:.1f} ms"
        'cpu:0: ... ms'

    Attributes:
        backend: ``"cpu"`` (compiled kernels), ``"cpu-torch"`` (PyTorch), ``"cpu-reference"`` (NumPy),
            ``"npu"`` or ``"test"``.
        device: Device that ran it, such as ``"cpu:0"``.
        product: Product the call was validated for.
        simulated: True when the device is simulated.
        workspace_bytes: Workspace the operator asked for.
        attempts: Number of times the call was started; above 1 if a worker died or a device could not take
            the call.
        queued_s: Seconds between admission and start on the device.
        copy_in_s: Seconds spent copying operands to the device.
        run_s: Seconds the operator ran.
        copy_out_s: Seconds spent copying results from the device.
        request_id: Identifier of the request in the server's log.
        verification: Notes on a verified result: the coordinate rule it agrees with, if not the service's
            own, and the number of points on the other side of a pixel edge. Empty if there is nothing to
            note.
        verified: Deviation of each requested output from the reference, if the call was verified.
        predicted_wait_s: Seconds the server expected the call to wait, on arrival.
        predicted_run_s: Seconds it expected for `copy_in_s`, `run_s` and `copy_out_s` together; 0.0 if it had
            seen no such call.
        tries: Number of times the client sent the call; above 1 after retries or hedges. Not on the wire.
        recorded: Source of `timeline`; None if nothing was recorded. Not a field, so that
            `dataclasses.asdict` leaves it out.
    """

    backend: str
    device: str
    product: Product
    simulated: bool = False
    workspace_bytes: int = 0
    attempts: int = 1
    queued_s: float = 0.0
    copy_in_s: float = 0.0
    run_s: float = 0.0
    copy_out_s: float = 0.0
    request_id: str = ""
    verification: str = ""
    verified: tuple[VerifiedOutput, ...] = ()
    predicted_wait_s: float = 0.0
    predicted_run_s: float = 0.0
    tries: int = 1
    recorded: ClassVar[Recorded | None] = None

    @property
    def timeline(self) -> Timeline | None:
        """Where the time of the call went, from call to return; None if it was not recorded.

        Example:
            >>> timeline = client.group_norm_backward(**call).info.timeline
            >>> timeline.seconds("run") < timeline.wall_s
            True
        """
        return None if self.recorded is None else self.recorded.timeline()

    def __repr__(self) -> str:
        """Device, product, stages and anything unusual; the attributes have everything."""
        simulated = ", simulated" if self.simulated else ""
        stages = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {getattr(self, name) * 1e3:.1f}" for name in _STAGES
        )
        parts = [f"{self.device} ({self.backend}{simulated}) for {self.product}", f"ms: {stages}"]
        counts = {"attempts": self.attempts, "tries": self.tries}
        parts += [f"{name} {count}" for name, count in counts.items() if count > 1]
        if self.verified:
            note = ", see .verification" if self.verification else ""
            parts.append(f"{counted(len(self.verified), 'output')} verified{note}")
        if self.request_id:
            parts.append(f"request {shortened(self.request_id, 40)}")
        return in_lines("ExecutionInfo", parts)

    def _repr_html_(self) -> str:
        """A table of the fields for notebooks, followed by the timeline if the call has one."""
        rows = [(each.name, _cell(getattr(self, each.name))) for each in fields(self)]
        table = html_table("ExecutionInfo", ("field", "value"), [row for row in rows if row[1]])
        timeline = self.timeline
        return table if timeline is None else f"{table}\n{timeline._repr_html_()}"

    def note(self, recorded: Recorded | None) -> ExecutionInfo:
        """Attaches the measurements of the call; returns self."""
        object.__setattr__(self, "recorded", recorded)
        return self


_STAGES = ("queued_s", "copy_in_s", "run_s", "copy_out_s")


def _cell(value: object) -> str:
    """A field as text; empty if its value is zero or empty."""
    if isinstance(value, float):
        return f"{value:.6g}" if value else ""
    return "; ".join(map(str, value)) if isinstance(value, tuple) else str(value or "")
