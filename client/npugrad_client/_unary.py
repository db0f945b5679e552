"""Unary calls: one message each way, by plan if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from npugrad import codec
from npugrad.errors import MalformedRequest, NpugradError
from npugrad_client._call import Answer
from npugrad_client._frames import destination, read_response, unary_request

if TYPE_CHECKING:
    from npugrad_client._attempt import Attempt
    from npugrad_client._call import Array, Prepared
    from npugrad_client._clock import CallClock
    from npugrad_client._plans import ClientPlan


def encode_unary(prepared: Prepared) -> bytes:
    """The request with all contents."""
    if prepared.request is not None:
        return prepared.request
    return bytes(unary_request(prepared).SerializeToString())


def read_unary(prepared: Prepared, data: bytes, attempt: Attempt, clock: CallClock | None = None) -> Answer:
    """Reads the results of a unary call; keeps a plan for later calls.

    Raises:
        NpugradError: The reply is malformed or does not answer this call.
    """
    plan = prepared.plan
    answer = None if plan is None else _read_by_plan(prepared, plan, data, attempt, clock)
    if answer is None:
        try:
            reply = prepared.registry.responses[prepared.record.name].FromString(data)
        except DecodeError:
            name = prepared.record.name
            text = f"{name}: {attempt.target}: INTERNAL: Exception deserializing response!"
            raise NpugradError(text, operator=name) from None
        answer = read_response(prepared, reply, clock)
        attempt.stages = reply.info.timeline.SerializeToString()
        if prepared.plans is not None:
            prepared.plans.keep(prepared, reply)
    return answer


def _read_by_plan(
    prepared: Prepared, plan: ClientPlan, data: bytes, attempt: Attempt, clock: CallClock | None
) -> Answer | None:
    """Reads the results if the reply is as planned; None if it must be read without the plan."""
    found = None if plan.reply is None else plan.reply.split(data)
    if found is None:
        return None
    contents, rest = found
    try:
        info = codec.decode_info(rest.info, clock)
    except MalformedRequest:
        return None
    attempt.stages = rest.info.timeline.SerializeToString()
    arrays: dict[str, Array | None] = {}
    pieces = iter(contents)
    for name, result in plan.results.items():
        if result is None:
            arrays[name] = None
            continue
        meta, dtype = result
        values: Array = np.ndarray(meta.shape, dtype, next(pieces))
        if name in prepared.targets:
            arrays[name] = target = destination(prepared, name, meta)
            target[...] = values
        else:
            arrays[name] = values.copy()
    return Answer(arrays, info)
