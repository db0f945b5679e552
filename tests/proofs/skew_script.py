"""Makes calls through the client of whichever version is on the path, as a user of it does."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import npugrad_client
from npugrad_client import Client, NpugradError

STREAMED, UNARY = 0, 2**40
"""Values of `stream_from_bytes` that force one way or the other."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Asked:
    """A call, in arrays and plain values but for its metas; `declared` are those of outputs."""

    operator: str
    arrays: Mapping[str, Any]
    attrs: Mapping[str, Any]
    metas: Mapping[str, Any]
    declared: Mapping[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """What came of a call in each way: results by name, a status that is 0 if legal, or what was raised."""

    unary: Mapping[str, Any] | str
    streamed: Mapping[str, Any] | str
    status: int | str


def answers(address: str, calls: Iterable[Asked]) -> list[Answered]:
    """Sends each call as one message and as a stream, and asks whether it is legal."""
    with (
        Client(address, timeout_s=_TIMEOUT_S, retry=None, stream_from_bytes=UNARY) as unary,
        Client(address, timeout_s=_TIMEOUT_S, retry=None, stream_from_bytes=STREAMED) as streamed,
    ):
        offered = {operator.name for operator in unary.list_operators() if operator.supported}
        devices = [device.name for device in unary.server_info().devices]
        if not devices:
            raise RuntimeError(f"{address}: found no device; expected some")
        return [
            Answered(
                _told(_results, unary, call), _told(_results, streamed, call), _told(_status, unary, call)
            )
            if call.operator in offered
            else Answered(*[f"the server says that it has no {call.operator}"] * 3)
            for call in calls
        ]


def _told(act: Callable[[Client, Asked], Any], client: Client, call: Asked) -> Any:
    try:
        return act(client, call)
    except NpugradError as error:
        return f"{type(error).__name__}: {error}"


def _results(client: Client, call: Asked) -> dict[str, Any]:
    found = getattr(client, call.operator)(**call.arrays, **call.attrs, out=dict(call.declared))
    return {name: getattr(found, name) for name in call.outputs if getattr(found, name) is not None}


def _status(client: Client, call: Asked) -> int:
    verdict = client.validate(call.operator, inputs=call.metas, attrs=call.attrs, outputs=call.declared)
    return verdict.status


def main() -> None:
    calls = pickle.load(sys.stdin.buffer)
    pickle.dump((npugrad_client.__file__, answers(sys.argv[1], calls)), sys.stdout.buffer)
