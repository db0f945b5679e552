"""From a serialized request to a call that the pool takes: recognised by its signature, or else decoded.

    signature -> known plan -> the call
    decode -> validate -> check contents -> plan, which is kept where later calls may meet it again

Wire integrity comes first, then the documented constraints, then the lengths of contents. All three follow
from the signature, and so does what is known of a call that was legal; of one that was not, nothing is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from npugrad.call import MAX_LABEL, CallOptions
from npugrad.codec import check_contents, decode_request, encode_meta
from npugrad.plan_cache import PlanCache
from npugrad.recipe import Recipe
from npugrad.signature import SignatureReader
from npugrad.template import Template, announce
from npugrad.validation import error_from_verdict, validate_call
from npugrad_server.pool import CallPlan, PlannedCall
from npugrad_server.pool.tenant import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.codec import WireCall
    from npugrad.generators import Draw
    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad.registry import Registry
    from npugrad.timeline import Mark
    from npugrad_server.pool.tenant import Tenant

CACHE_BYTES = 32 * 2**20
"""What plans may take together, as it is estimated."""
INLINE_REPLY_BYTES = 256 * 1024
"""Results below this length travel in the header of a streamed reply, the others in chunks after it. The
header so stays below gRPC's default message limit of 4 MiB, which other clients may have."""
_PLAN_BYTES = 8 * 1024
"""With what grows with the key, more than a plan takes: measured are 6 to 10 KiB for keys of 100 to 260
bytes, demand, line of the log and template of the reply included."""
_BYTES_PER_KEY_BYTE = 24
"""What a byte of a key may become: two are an integer of an array, with its place in a tuple."""


@dataclass(eq=False)
class Known:
    """What is known of every request of one signature.

    Attributes:
        plan: What the pool makes of it.
        announced: Content length of each operand that comes in chunks.
        drawn: What the recipes draw, and for which tensors.
        content_bytes: Length of all contents that travel.
        reply_bytes: Length of all contents of its reply.
        reply: Template of a reply, or of that in the header of a streamed one, once the call came twice.
        carried: Names of the outputs in it.
        follow: Parameter index and name of those that come in chunks after it.
    """

    plan: CallPlan
    announced: Mapping[str, int]
    drawn: Mapping[str, tuple[Draw, TensorMeta]]
    content_bytes: int
    reply_bytes: int
    reply: Template | None = None
    carried: tuple[str, ...] = ()
    follow: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, wire: WireCall, outputs: Mapping[str, TensorMeta | None], *, is_kept: bool) -> Known:
        """What is known of requests like one that was decoded and is legal, with these outputs."""
        contents = wire.contents
        options = CallOptions(deterministic=wire.options.deterministic, verify=wire.options.verify)
        call, unused = set_aside(wire, outputs)
        return cls(
            CallPlan(wire.record, call, outputs, options, is_kept, unused),
            announced={name: content.nbytes for name, content in contents.items() if content.follows},
            drawn={name: (c.recipe.draw, c.recipe.meta) for name, c in contents.items() if c.recipe},
            content_bytes=sum(content.nbytes for content in contents.values() if content.recipe is None),
            reply_bytes=sum(meta.nbytes for meta in outputs.values() if meta is not None),
        )


@dataclass(frozen=True)
class Request(PlannedCall):
    """A call whose request is legal, and whose contents have the right lengths.

    Attributes:
        known: What other requests of its signature have as well.
        inline: Contents that came with it, by operand, of those that are used.
        recipes: What makes the contents that came as recipes, by operand.
        marks: When its stages ended, from its arrival on.
    """

    known: Known
    inline: Mapping[str, bytes | memoryview]
    recipes: Mapping[str, Recipe]
    marks: list[Mark]

    @classmethod
    def decoded(
        cls,
        known: Known,
        wire: WireCall,
        request_id: str,
        deadline_s: float | None,
        marks: list[Mark],
        tenant: Tenant,
    ) -> Request:
        """One that was decoded."""
        contents, unused = wire.contents, known.plan.unused
        used = {name: content for name, content in contents.items() if name not in unused}
        inline = {name: content.data for name, content in used.items() if content.data is not None}
        recipes = {name: content.recipe for name, content in contents.items() if content.recipe is not None}
        return cls(
            known.plan, wire.options, request_id, deadline_s, known, inline, recipes, marks, tenant=tenant
        )


class Planner:
    """Plans calls, and remembers the plans.

    Attributes:
        product: Product the calls are validated for; plans for another one are not used any more.
    """

    def __init__(self, product: Product, registry: Registry) -> None:
        """Knows no plan yet.

        Args:
            product: Product the server serves.
            registry: The operators and their messages.
        """
        self.product = product
        self._registry = registry
        self._readers = {
            (name, chunked): SignatureReader(request.DESCRIPTOR, "chunked" if chunked else "whole")
            for name, request in registry.requests.items()
            for chunked in (False, True)
        }
        self._cache: PlanCache[Known] = PlanCache(CACHE_BYTES)

    @property
    def plans(self) -> int:
        """How many plans are kept."""
        return len(self._cache)

    def plan(
        self,
        record: OpRecord,
        data: bytes | None,
        read: Callable[[], Any],
        *,
        start: int = 0,
        request_id: str,
        timeout_s: float | None,
        chunked: bool,
        marks: list[Mark] | None = None,
        tenant: Tenant = NOBODY,
    ) -> Request:
        """Plans the call of a serialized request.

        Args:
            record: The operator.
            data: What ends with the request; None where that is not known.
            read: Gives the typed request, where that is needed; its errors are passed on.
            start: Where the request begins.
            request_id: Identifier for the log.
            timeout_s: Seconds until the result is of no use; None for never.
            chunked: Whether contents may follow in chunks.
            marks: When it arrived; its stages are added.
            tenant: Whose call it is.

        Raises:
            MalformedTensor: Types, sizes or strides are not sane, or a content does not fit its tensor.
            MalformedRequest: An attribute is missing or an option is out of range.
            OperatorError: 161001, 161002, 561002 or an unsupported operator: a constraint is broken.
            InvalidRecipe: RECIPE_INVALID.
            RequestError: CONTENT_UNSUPPORTED.
        """
        now = time.monotonic()
        deadline_s = None if timeout_s is None else now + timeout_s
        marks = [("", now)] if marks is None else marks
        reader = self._readers[record.name, chunked]
        signature = None if data is None else reader.read(data, start)
        if signature is not None:
            known = self._cache.get(signature.key)
            if known is not None and known.plan.record is record and known.plan.call.product is self.product:
                request = self._again(known, signature.taken, request_id, deadline_s, marks, tenant)
                if request is not None:
                    marks.append(("decode", time.monotonic()))
                    if known.reply is None:
                        self._make_reply(known, INLINE_REPLY_BYTES if chunked else None)
                    return request
        wire, outputs = self._decode(record, read(), chunked, marks)
        is_kept = data is not None and signature is not None and reader.is_plain(data, start)
        known = Known.of(wire, outputs, is_kept=is_kept)
        if signature is not None and is_kept:
            self._cache.put(signature.key, known, wire.options.label, _nbytes(signature.key))
        request = Request.decoded(known, wire, request_id, deadline_s, marks, tenant)
        marks.append(("validate", time.monotonic()))
        return request

    def _decode(
        self, record: OpRecord, message: Any, chunked: bool, marks: list[Mark]
    ) -> tuple[WireCall, Mapping[str, TensorMeta | None]]:
        """A legal request and its outputs; errors as in `plan`."""
        wire = decode_request(record, message, self.product)
        marks.append(("decode", time.monotonic()))
        verdict = validate_call(record, wire.call)
        if verdict.violations:
            raise error_from_verdict(record, verdict)
        check_contents(wire, chunked=chunked)
        return wire, verdict.outputs

    def _again(
        self,
        known: Known,
        taken: Mapping[str, Any],
        request_id: str,
        deadline_s: float | None,
        marks: list[Mark],
        tenant: Tenant,
    ) -> Request | None:
        """A request whose signature is known; None where what is not in it is not legal."""
        plan, inline, recipes = known.plan, {}, {}
        for name, parts in taken.items():
            if "data" in parts:
                if name not in plan.unused:
                    inline[name] = parts["data"]
            elif "recipe" in parts:
                recipe = _recipe(*known.drawn[name], parts["recipe"])
                if recipe.problem():
                    return None
                recipes[name] = recipe
        options = _options(plan.options, taken["options"]) if "options" in taken else plan.options
        if options is None:
            return None
        return Request(plan, options, request_id, deadline_s, known, inline, recipes, marks, tenant=tenant)

    def _make_reply(self, known: Known, chunk_from_bytes: int | None) -> None:
        record = known.plan.record
        message = self._registry.responses[record.name]()
        lengths = {}
        for param in record.outputs:
            meta = known.plan.outputs[param.name]
            if meta is not None:
                encode_meta(meta, getattr(message, param.name).meta)
                lengths[param.name] = meta.nbytes
        carried = announce(message, lengths, chunk_from_bytes)
        known.carried = tuple(carried)
        known.follow = tuple((record.param_index(name), name) for name in lengths if name not in carried)
        known.reply = Template(message, "info", carried)


def set_aside(wire: WireCall, outputs: Mapping[str, TensorMeta | None]) -> tuple[CallMeta, frozenset[str]]:
    """Finds the operands on whose values no wanted result depends: their contents need not be kept.

    Those that come as recipes are made all the same: their digest is part of the contract.

    Args:
        wire: A legal call whose contents fit it.
        outputs: Its outputs, None for masked-out ones.

    Returns:
        The call with these operands contiguous, their axes in the order of the formula, and their names.
    """
    record, call = wire.record, wire.call
    made = {name for name, content in wire.contents.items() if content.recipe is not None}
    unused = record.unused(call) - made
    is_run = any(meta is not None for meta in outputs.values())  # else nobody looks at its operands
    ordered = record.ordered(call) if unused and is_run else call
    return call.with_inputs(**{name: ordered.tensor(name).contiguous() for name in unused}), unused


def _recipe(draw: Draw, meta: TensorMeta, given: Mapping[str, Any]) -> Recipe:
    return Recipe.of(draw, meta, given.get("seed", 0), bytes(given.get("digest", b"")))


def _options(shared: CallOptions, given: Mapping[str, Any]) -> CallOptions | None:
    """Options with the label and the priority of one request; None if they are not legal."""
    label, priority = given.get("label", b""), given.get("priority", 0)
    if len(label) > MAX_LABEL:  # which nobody should have to remember
        return None
    return _completed(shared.deterministic, shared.verify, bytes(label), priority)


@lru_cache(maxsize=1024)
def _completed(deterministic: bool, verify: bool, label: bytes, priority: int) -> CallOptions | None:
    signed = priority - 2**64 if priority >> 63 else priority
    options = CallOptions(deterministic, signed, label.decode(errors="replace"), verify)
    return None if options.problem() else options


def _nbytes(key: bytes) -> int:
    return _PLAN_BYTES + _BYTES_PER_KEY_BYTE * len(key)
