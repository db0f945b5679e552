"""`make prove-mutations`: a million damaged messages, none of which may crash or hang a server.

Good requests of every operator, and ones with a thing or more changed, are crossed with each other field by
field and damaged byte by byte; they go to unary methods, to Execute as a header or in frames that are damaged
themselves, and to Validate. Every answer has to be one that a request can deserve. Of some, what is right is
foretold as in `tests.e2e.mutations`, and compared.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.calls import Sample
from tests.e2e.harness import Wire, assert_unharmed, run_victim
from tests.e2e.mutations import (
    BASES,
    as_header,
    as_question,
    assert_answered,
    assert_validated,
    damaged_bytes,
    damaged_message,
    good,
)
from tests.fix_server import ServerProcess
from tests.proofs.proof import run, told, verdict
from tests.raw_calls import MAX_CALL_BYTES, RawCall, RawCaller, Unanswered

from npugrad.operator import OpRecord
from npugrad.registry import REGISTRY
from npugrad.v1 import validation_pb2

WAYS = {"unary": 40, "Execute header": 15, "Execute frames": 20, "Validate": 25}
"""How messages go, and how often in a hundred."""
DESERVED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that can be a message's fault. INTERNAL and UNKNOWN are the server's."""
_EXECUTE = f"/{REGISTRY.backward.full_name}/Execute".encode()
_SERVICE = validation_pb2.DESCRIPTOR.services_by_name["ValidationService"].full_name
_VALIDATE = f"/{_SERVICE}/Validate".encode()
_ROUND, _MOST_BYTES = 20_000, MAX_CALL_BYTES // 2


@dataclass(frozen=True)
class Parts:
    """A request, taken apart into the bytes of each of its fields."""

    record: OpRecord
    fields: dict[str, bytes]


@dataclass
class Tried:
    """Messages that had an answer, by way, status and operator; how many were compared; what was wrong."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    failure: str = ""


# --------------------------------------------------------------------------------------------- what is sent


def corpus(count: int, seed_: int = 0) -> dict[str, list[Parts]]:
    """Good requests of every operator, and so many damaged ones, by operator."""
    found: dict[str, list[Parts]] = {}
    for made in BASES[REGISTRY]:
        found[made.record.name] = [_parts(made.record, good(made))]

    rng = random.Random(seed_)
    for _ in range(count):
        record, message = damaged_message(rng, REGISTRY)
        found[record.name].append(_parts(record, message))
    return found


def _parts(record: OpRecord, message: Any) -> Parts:
    fields = {}
    for descriptor, _ in message.ListFields():
        alone = type(message)()
        alone.MergeFrom(message)
        for other, _ in message.ListFields():
            if other.name != descriptor.name:
                alone.ClearField(other.name)
        fields[descriptor.name] = alone.SerializeToString()
    return Parts(record, fields)


class Mutator:
    """Draws one message after the other."""

    def __init__(self, found: dict[str, list[Parts]], seed_: int) -> None:
        self._corpus, self._rng = found, random.Random(seed_)
        self._names = list(found)
        self._samples = {made.record.name: made for made in BASES[REGISTRY]}
        self._frames = {name: _good_frames(made) for name, made in self._samples.items()}

    def request(self) -> tuple[OpRecord, bytes]:
        """A request: mostly good, with fields of others, and sometimes with bytes damaged."""
        rng = self._rng
        all_ = self._corpus[rng.choice(self._names)]
        fields = dict(all_[0].fields if rng.random() < 0.7 else rng.choice(all_).fields)
        for _ in range(rng.randrange(4)):
            other = rng.choice(all_)
            name = rng.choice(other.record.params).name
            if name in other.fields:
                fields[name] = other.fields[name]
            else:
                fields.pop(name, None)
        data = b"".join(fields.values())[:_MOST_BYTES]
        return all_[0].record, damaged_bytes(rng, data)[:_MOST_BYTES] if rng.random() < 0.4 else data

    def one_in(self, many: int) -> bool:
        """Whether this is one of so many."""
        return self._rng.randrange(many) == 0

    def call(self) -> tuple[str, OpRecord, bytes, RawCall]:
        """The way, the operator, the request where there is one alone, and the call that sends it."""
        (way,) = self._rng.choices(list(WAYS), list(WAYS.values()))
        record, data = self.request()
        if way == "unary":
            call = RawCall(f"/{REGISTRY.backward.full_name}/{record.rpc}".encode(), [data])
        elif way == "Execute header":
            call = RawCall(_EXECUTE, [as_header(record, data)])
        elif way == "Validate":
            call = RawCall(_VALIDATE, [as_question(record, data)])
        else:
            call = RawCall(_EXECUTE, self._stream(record.name))
        return way, record, data, call

    def _stream(self, name: str) -> Sequence[bytes]:
        """The frames of a call, of which some are damaged, lost, doubled or in another place."""
        rng, frames = self._rng, list(self._frames[name])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(frames))
            way = rng.randrange(6)
            if way <= 1:
                frames[at] = damaged_bytes(rng, frames[at])[:_MOST_BYTES]
            elif way == 2 and len(frames) > 1:
                del frames[at]
            elif way == 3:
                frames.insert(at, frames[rng.randrange(len(frames))])
            elif way == 4:
                frames[at] = rng.choice(self._frames[rng.choice(self._names)])
            else:
                rng.shuffle(frames)
        while sum(map(len, frames)) + 5 * len(frames) > MAX_CALL_BYTES:
            frames.pop()
        return frames


def _good_frames(made: Sample) -> list[bytes]:
    """All frames of a call as it should be; of one that is too long the first."""
    frames = [each.SerializeToString() for each in itertools.islice(made.frames(chunk_bytes=512), 40)]
    return [each for each in frames if len(each) < _MOST_BYTES]


# -------------------------------------------------------------------------------------------------- judging


def tried(count: int, running: ServerProcess, *, judged: int, seed_: int = 0, drawn: int = 1500) -> Tried:
    """Sends so many messages to a server and looks at it after every 20,000.

    One in `judged` is compared with what is right; messages are made of `drawn` damaged requests.
    """
    result, mutator = Tried(), Mutator(corpus(drawn, seed_), seed_)
    known: dict[int, tuple[str, OpRecord]] = {}

    def drawn_calls(number: int) -> Iterator[RawCall]:
        for _ in range(number):
            way, record, data, call = mutator.call()
            if judged and way != "Execute frames" and mutator.one_in(judged):
                _judge(way, wire, record, data)
                result.judged += 1
            known[id(call)] = way, record
            yield call

    with running.channel() as channel, RawCaller(running.address) as caller:
        wire = Wire.of(channel)
        try:
            while (sent := result.sent.total()) < count:
                for call, status in caller.statuses(drawn_calls(min(_ROUND, count - sent))):
                    way, record = known.pop(id(call))
                    result.sent[way] += 1
                    result.statuses[status.name] += 1
                    result.operators[record.name] += 1
                    assert status in DESERVED, f"{way}, {record.name}: {status.name}: {call}"
                assert_unharmed(running, channel, BASES[REGISTRY][0])
        except (AssertionError, Unanswered, grpc.RpcError) as error:
            result.failure = f"{type(error).__name__}: {error}"
    return result


def _judge(way: str, wire: Wire, record: OpRecord, data: bytes) -> None:
    if way == "Validate":
        assert_validated(wire, record, data)
    else:
        assert_answered(wire, record, data)


def main(given: Any, folder: Path) -> bool:
    begin_s = time.monotonic()
    with run_victim(folder, "--log-level", "warning") as running:
        found = tried(given.messages, running, judged=given.judged, seed_=given.seed)
    if found.failure:
        print(found.failure[:4000])
    took_s = time.monotonic() - begin_s
    return verdict(
        f"mutations: {found.sent.total()} messages ({told(found.sent)}) of {len(found.operators)} operators "
        f"in {took_s:.0f} s, {found.judged} compared: {told(found.statuses)}; no crash, no hang",
        not found.failure,
    )


if __name__ == "__main__":
    run(
        main,
        __doc__,
        messages=(1_000_000, "how many"),
        judged=(100, "one in so many is compared"),
        seed=(0, "of all that is drawn"),
    )
