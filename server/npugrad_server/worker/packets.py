"""The messages between the pool and its workers as packets.

Most are a line of JSON: the name of the message and its fields. Those sent for every call are packed,
little-endian, after a first byte that no JSON begins with:

    1 RunAgain   the message itself
    2 CallDone   call, seconds of copying in, running and copying out, workspace, start, seconds of verifying,
                 backend

The text comes last and ends with the packet.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from struct import Struct
from typing import TYPE_CHECKING, Any

from npugrad.attributes import attrs_from_json, attrs_to_json
from npugrad.call import CallOptions
from npugrad.meta import CallMeta, TensorMeta
from npugrad.products import product_from_name
from npugrad_server.worker import protocol
from npugrad_server.worker.canary_messages import CanaryRun, RunCanary
from npugrad_server.worker.protocol import AskWorkspace, CallDone, RunCall
from npugrad_server.worker.run_again import RunAgain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npugrad_server.worker.protocol import Message

MAX_MESSAGE_BYTES = 192 * 1024
"""Largest message, below the kernel's default socket buffer. An operator's metas need a few kilobytes, and
each of its longest attributes at most 24."""

_DONE = 2
_DONE_FIELDS = Struct("<BQdddQdd")
_PLAIN = {
    cls.__name__: cls
    for cls in (
        protocol.OpenDevice,
        protocol.DeviceOpening,
        protocol.DeviceReady,
        protocol.OpenFailed,
        protocol.DeviceFailed,
        protocol.AskMemory,
        protocol.MemoryFound,
        protocol.Ping,
        protocol.Pong,
        protocol.AbandonCall,
        protocol.ForgetPlan,
        protocol.CallUnknown,
        protocol.NeedWorkspace,
        protocol.WorkspaceGranted,
        protocol.WorkspaceRefused,
        CallDone,
        protocol.WorkspaceFound,
        protocol.CallFailed,
        protocol.CallDeferred,
        RunCanary,
        CanaryRun,
    )
}


def encode(message: Message) -> bytes:
    """One packet: JSON, unless the message is itself a packet.

    Raises:
        ValueError: It exceeds `MAX_MESSAGE_BYTES`.
    """
    if isinstance(message, RunAgain):
        return message
    if isinstance(message, RunCall):
        payload = _run_payload(message)
    elif isinstance(message, AskWorkspace):
        payload = {"call": message.call, "operator": message.operator, **_call_to_json(message.meta)}
    else:
        payload = asdict(message)
    packet = json.dumps([type(message).__name__, payload], separators=(",", ":")).encode()
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ValueError(f"found a message of {len(packet)} bytes; expected at most {MAX_MESSAGE_BYTES}")
    return packet


def pack(message: CallDone) -> bytes:
    """One packet of a fixed layout, in a tenth of JSON's time; JSON if the message has its rare fields."""
    if message.verification or message.verified:
        return encode(message)
    numbers = _DONE_FIELDS.pack(
        _DONE,
        message.call,
        message.copy_in_s,
        message.run_s,
        message.copy_out_s,
        message.workspace_bytes,
        message.begun_s,
        message.verify_s,
    )
    return numbers + message.backend.encode()


def decode(packet: bytes) -> Message:
    """Reads a packet.

    Raises:
        ValueError: It is not a message of this protocol.
    """
    kind = packet[0] if packet else None
    if kind == _DONE:
        return _done(packet)
    if kind == RunAgain.KIND:
        return RunAgain.received(packet)
    try:
        name, payload = json.loads(packet)
        if name == RunCall.__name__:
            return _run_message(payload)
        if name == AskWorkspace.__name__:
            return AskWorkspace(payload["call"], payload["operator"], _call_from_json(payload))
        return _PLAIN[name](**payload)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of this protocol: {error!r}") from error


def _done(packet: bytes) -> CallDone:
    _check_length(packet, _DONE_FIELDS.size, MAX_MESSAGE_BYTES)
    _, call, copy_in_s, run_s, copy_out_s, workspace_bytes, *rest = _DONE_FIELDS.unpack_from(packet)
    backend = packet[_DONE_FIELDS.size :].decode()
    return CallDone(call, copy_in_s, run_s, copy_out_s, workspace_bytes, backend, *rest)


def _check_length(packet: bytes, nbytes: int, text_bytes: int) -> None:
    if not nbytes <= len(packet) <= nbytes + text_bytes:
        raise ValueError(f"found a packet of {len(packet)} bytes; expected {nbytes} to {nbytes + text_bytes}")


def _run_payload(message: RunCall) -> dict[str, Any]:
    return {
        "call": message.call,
        "operator": message.operator,
        **_call_to_json(message.meta),
        "outputs": _metas_to_json(message.outputs),
        "options": asdict(message.options),
        "input_offsets": dict(message.input_offsets),
        "output_offsets": dict(message.output_offsets),
        "deadline_s": message.deadline_s,
        "workspace_bytes": message.workspace_bytes,
        "plan": message.plan,
    }


def _run_message(payload: dict[str, Any]) -> RunCall:
    return RunCall(
        call=payload["call"],
        operator=payload["operator"],
        meta=_call_from_json(payload),
        outputs=_metas_from_json(payload["outputs"]),
        options=CallOptions(**payload["options"]),
        input_offsets=payload["input_offsets"],
        output_offsets=payload["output_offsets"],
        deadline_s=payload["deadline_s"],
        workspace_bytes=payload["workspace_bytes"],
        plan=payload["plan"],
    )


def _call_to_json(call: CallMeta) -> dict[str, Any]:
    return {
        "product": call.product.value,
        "inputs": _metas_to_json(call.inputs),
        "attrs": attrs_to_json(call.attrs),
    }


def _call_from_json(payload: dict[str, Any]) -> CallMeta:
    attrs = attrs_from_json(payload["attrs"])
    return CallMeta(_metas_from_json(payload["inputs"]), attrs, product=product_from_name(payload["product"]))


def _metas_to_json(metas: Mapping[str, TensorMeta | None]) -> dict[str, Any]:
    return {
        name: None if meta is None else [getattr(meta, f.name) for f in fields(TensorMeta)]
        for name, meta in metas.items()
    }


def _metas_from_json(metas: dict[str, Any]) -> dict[str, TensorMeta | None]:
    return {name: None if given is None else TensorMeta(*given) for name, given in metas.items()}
