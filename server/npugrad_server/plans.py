"""Turns a serialized request into a call for the pool: recognised by its signature, or else decoded.

    signature -> known plan -> the call
    decode -> validate -> check contents -> plan, which is cached if later calls may reuse it

Wire integrity is checked first, then the documented constraints, then the lengths of contents. All three
depend on the signature alone, and so does everything that is known about a legal call; nothing is kept of an
illegal one.
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
"""Estimated memory that all plans together may take."""
INLINE_REPLY_BYTES = 256 * 1024
"""Results below this length travel in the header of a streamed reply, the others in chunks after it. This
keeps the header below gRPC's default message limit of 4 MiB, which other clients may have."""
_PLAN_BYTES = 8 * 1024
"""Together with what grows with the key, more than a plan takes: 6 to 10 KiB were measured for keys of 100 to
260 bytes, including the demand, the log line and the reply template."""
_BYTES_PER_KEY_BYTE = 24
"""What a byte of a key may become: two bytes may be an integer of an array, with its place in a tuple."""


@dataclass(eq=False)
class Known:
    """What all requests of one signature have in common.

    Attributes:
        plan: The pool's plan.
        announced: Content length of each operand that comes in chunks.
        drawn: What the recipes draw, and for which tensors.
        content_bytes: Length of all contents that are sent.
        reply_bytes: Length of all contents of the reply.
        reply: Template of the reply, or of that in the header of a streamed one, once the call has come
            twice.
        carried: Names of the outputs in it.
        follow: Parameter index and name of the outputs sent in chunks after it.
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
        """Derives it from a legal decoded request and its outputs."""
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
        known: What it has in common with other requests of its signature.
        inline: Contents that came with it and are used, by operand.
        recipes: Recipes of the contents that came as such, by operand.
        marks: When its stages ended, starting with its arrival.
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
        """Creates a request from a decoded one."""
        contents, unused = wire.contents, known.plan.unused
        used = {name: content for name, content in contents.items() if name not in unused}
        inline = {name: content.data for name, content in used.items() if content.data is not None}
        recipes = {name: content.recipe for name, content in contents.items() if content.recipe is not None}
        return cls(
            known.plan, wire.options, request_id, deadline_s, known, inline, recipes, marks, tenant=tenant
        )


class Planner:
    """Plans calls, and caches the plans.

    Attributes:
        product: Product the calls are validated for; plans for another one are no longer used.
    """

    def __init__(self, product: Product, registry: Registry) -> None:
        """Starts with an empty cache.

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
        """Number of cached plans."""
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
            data: Bytes that end with the request; None if unknown.
            read: Called for the typed request if it is needed; its errors propagate.
            start: Where the request begins in `data`.
            request_id: Identifier for the log.
            timeout_s: Seconds until the result is useless; None for never.
            chunked: Whether contents may follow in chunks.
            marks: Marks since its arrival; its stages are appended.
            tenant: Whose call it is.

        Raises:
            MalformedTensor: Types, sizes or strides are invalid, or a content does not fit its tensor.
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
        """Decodes and validates a request; returns it with its outputs. Errors as in `plan`."""
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
        """A request with a known signature; None if something outside the signature is not legal."""
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
    """Finds the operands whose values affect no wanted result: their contents need not be kept.

    Operands that come as recipes are made anyway: their digest is part of the contract.

    Args:
        wire: A legal call whose contents fit it.
        outputs: Its outputs, None for masked-out ones.

    Returns:
        The call with these operands contiguous and their axes in the order of the formula, and their names.
    """
    record, call = wire.record, wire.call
    made = {name for name, content in wire.contents.items() if content.recipe is not None}
    unused = record.unused(call) - made
    is_run = any(meta is not None for meta in outputs.values())  # else its operands are never read
    ordered = record.ordered(call) if unused and is_run else call
    return call.with_inputs(**{name: ordered.tensor(name).contiguous() for name in unused}), unused


def _recipe(draw: Draw, meta: TensorMeta, given: Mapping[str, Any]) -> Recipe:
    return Recipe.of(draw, meta, given.get("seed", 0), bytes(given.get("digest", b"")))


def _options(shared: CallOptions, given: Mapping[str, Any]) -> CallOptions | None:
    """Options with the label and the priority of one request; None if they are not legal."""
    label, priority = given.get("label", b""), given.get("priority", 0)
    if len(label) > MAX_LABEL:  # too long to cache
        return None
    return _completed(shared.deterministic, shared.verify, bytes(label), priority)


@lru_cache(maxsize=1024)
def _completed(deterministic: bool, verify: bool, label: bytes, priority: int) -> CallOptions | None:
    signed = priority - 2**64 if priority >> 63 else priority
    options = CallOptions(deterministic, signed, label.decode(errors="replace"), verify)
    return None if options.problem() else options


def _nbytes(key: bytes) -> int:
    return _PLAN_BYTES + _BYTES_PER_KEY_BYTE * len(key)
