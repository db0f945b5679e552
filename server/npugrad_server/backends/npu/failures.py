"""What a failed call means to its caller and to the worker, from the table of codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.error_table import BY_CODE, INNER
from npugrad.errors import DeviceError, DeviceOutOfMemory
from npugrad_server.acl.faults import Action
from npugrad_server.backends.base import DeviceLost, RestartPolicy

if TYPE_CHECKING:
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad_server.acl.runtime import AclError

_RESTART_POLICIES = {
    Action.BACK_OFF: RestartPolicy.SLOWLY,
    Action.UNAVAILABLE: RestartPolicy.SLOWLY,
    Action.QUARANTINE: RestartPolicy.NEVER,
}
_BUSY = (Action.OUT_OF_RESOURCES, Action.RESUBMIT)


def device_error(operator: str, error: AclError, meta: CallMeta | None = None) -> DeviceError:
    """The caller's error if the worker survives: the vendor's number, function and text.

    Args:
        operator: The operator that ran.
        error: What CANN said.
        meta: The call, if the error belongs to one.
    """
    message, action = f"{operator}: {error}", error.fault.action
    if meta is not None and _disagrees(error):
        message = (
            f"{operator}: {error.head}, although the call meets every documented constraint: the device "
            f"disagrees with npugrad's record of the operator, which is a bug in npugrad{_words(error)}; "
            f"the call was {_described(meta)}"
        )
    if action is Action.OUT_OF_MEMORY:
        return DeviceOutOfMemory(message, code=error.code, source="device", operator=operator)
    return DeviceError(
        message, code=error.code or None, reason=_reason(error, action), source="device", operator=operator
    )


def _disagrees(error: AclError) -> bool:
    """Whether the device rejected something that our validator checks too, and accepted."""
    row = BY_CODE.get(error.code)
    return error.fault.action is Action.REFUSE or (row is not None and row.grpc_status == "INVALID_ARGUMENT")


def _words(error: AclError) -> str:
    return f": {error.text}" if error.text else ""


def _described(meta: CallMeta) -> str:
    """Types, shapes and attributes, for whoever fixes the record."""
    operands = [f"{name} {_tensor(found)}" for name, found in meta.inputs.items()]
    return ", ".join(operands + [f"{name} {value}" for name, value in meta.attrs.items()])


def _tensor(meta: TensorMeta | None) -> str:
    if meta is None:
        return "null"
    return str(meta) if meta.is_contiguous else f"{meta} strides {meta.element_strides}"


def _reason(error: AclError, action: Action) -> str:
    if action in _BUSY:
        return "DEVICE_BUSY"
    if error.code in BY_CODE:
        return BY_CODE[error.code].reason
    # The operator libraries return numbers that the vendor's list does not have.
    return BY_CODE[INNER].reason if error.code // 1000 == INNER // 1000 else "DEVICE_ERROR"


def device_lost(operator: str, error: AclError, after: BaseException | None = None) -> DeviceLost:
    """The error that makes the worker exit.

    Args:
        operator: The operator that ran.
        error: What ended it.
        after: The failure before it, if the error comes from cleaning up.
    """
    action = error.fault.action
    before = f"{after}; then " if after is not None else ""
    words = "damaged, not tried again: " if action is Action.QUARANTINE else ""
    timed_out = action is Action.TIMED_OUT
    return DeviceLost(
        f"{words}{operator}: {before}{error}",
        error.code,
        restart_policy=_RESTART_POLICIES.get(action, RestartPolicy.SOON),
        retry=not timed_out,
        # The caller's limit was too short for the call, or the device hangs: opening it again will tell.
        exempt=timed_out,
    )
