"""Calls by plan: what follows from a call's signature is worked out once, for all calls that follow.

A plan is kept once a server has answered a call of its signature well. Of that answer it holds what is the
same in the next one, byte for byte; an answer that differs is read as if there were no plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad import codec, layout
from npugrad.call import CallOptions
from npugrad.frames import encode_header
from npugrad.registry import REGISTRY, Registry
from npugrad.template import Template, announce
from npugrad_client import _arrays
from npugrad_client._call import CHUNKED_FROM_BYTES, Prepared, overlap, prepare, require_options
from npugrad_client._signature import sign

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from npugrad.meta import CallMeta, TensorMeta
    from npugrad.operator import OpRecord
    from npugrad.products import Product
    from npugrad_client._call import Array

MAX_PLANS = 256
"""Plans that a client keeps, of some kilobytes each: those that were used last."""
_MAX_OPTIONS = 64
"""Encoded options that it keeps: labels are few, but nothing makes them so."""
_OPTIONS = ("deterministic", "priority", "label", "verify")


@dataclass(frozen=True, eq=False)
class ClientPlan:
    """What follows from a call's signature.

    Attributes:
        call: Metas and attributes.
        expected: Outputs as the local record infers them; empty when that was not tried.
        nbytes: Bytes of data in the larger direction.
        are_direct: Of each operand that is not null, whether its content is the array's memory as it is.
        zeros: What is sent in place of each of which no value is used; None for the others.
        request: The request but for contents and options; of a call that is streamed, that in its header.
        follows: Of each operand that is not null, its name if it comes in chunks after that; else None.
        reply: The reply but for contents and info; None for a call that is streamed.
        results: Outputs by name, None for those that the reply does not have; of the others meta and NumPy's
            type.
    """

    call: CallMeta
    expected: Mapping[str, TensorMeta | None]
    nbytes: int
    are_direct: tuple[bool, ...]
    zeros: tuple[bytes | None, ...]
    request: Template
    follows: tuple[str | None, ...]
    reply: Template | None = None
    results: Mapping[str, tuple[TensorMeta, np.dtype[Any]] | None] = field(default_factory=dict)

    def contents(self, arrays: Sequence[Array]) -> tuple[dict[str, memoryview], frozenset[str]]:
        """The content of each operand that is not null, and the operands of which no value is used."""
        names = [name for name, meta in self.call.inputs.items() if meta is not None]
        found = {n: _memory(each) for n, each in zip(names, _contents(self, arrays), strict=True)}
        return found, frozenset(n for n, zero in zip(names, self.zeros, strict=True) if zero is not None)


class Plans:
    """The plans of one client.

    Thread safety: every method may be called from several threads at once. There is no lock, as a fork may
    leave one held by a thread that is gone: at worst a plan is forgotten.
    """

    def __init__(self, registry: Registry = REGISTRY) -> None:
        """None yet, for calls of these operators."""
        self._registry = registry
        # Two halves: what is used moves to the young one, and when that is full, the old one is forgotten.
        self._young: dict[Hashable, ClientPlan] = {}
        self._old: dict[Hashable, ClientPlan] = {}
        self._options: dict[Hashable, bytes] = {}

    def prepare(
        self,
        record: OpRecord,
        inputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
        out: Mapping[str, Any] | None,
        options: CallOptions,
        product: Product | None = None,
    ) -> Prepared:
        """Makes a call from what the caller gave, as `_call.prepare` does, with the same errors."""
        signature = sign(record, inputs, attrs, out, options, product)
        key, arrays = signature or (None, [])
        plan = None if key is None else self._find(key)
        if plan is None:
            made = prepare(record, inputs, attrs, out, options, product, registry=self._registry)
            if key is None or tuple(inputs) != tuple(made.call.inputs):  # contents go by the record's order
                return made
            return replace(made, plans=self, key=key, arrays=arrays)
        varying = self._encoded(record, options)
        targets = _targets(record, out) if out else {}
        contents = _contents(plan, arrays)
        return Prepared(
            record=record,
            call=plan.call,
            contents={} if plan.reply else _following(plan, contents),
            options=options,
            expected=plan.expected,
            targets=targets,
            is_apart=bool(targets) and overlap(contents, targets.values()),
            registry=self._registry,
            plans=self,
            plan=plan,
            key=key,
            arrays=arrays,
            request=plan.request.encode(contents, varying)
            if plan.reply
            else self._header(record, plan, contents, varying),
        )

    def _header(self, record: OpRecord, plan: ClientPlan, contents: Sequence[Any], varying: bytes) -> bytes:
        """The first frame of a call that is streamed."""
        inline = [each for name, each in zip(plan.follows, contents, strict=True) if name is None]
        message = plan.request.encode(inline, varying)
        return encode_header(self._registry.execute_request, record.name, message)

    def _find(self, key: Hashable) -> ClientPlan | None:
        plan = self._young.get(key)
        if plan is None:
            plan = self._old.get(key)
            if plan is not None:
                self._put(key, plan)
        return plan

    def _put(self, key: Hashable, plan: ClientPlan) -> None:
        if len(self._young) >= MAX_PLANS // 2:
            self._old, self._young = self._young, {}
        self._young[key] = plan

    def _encoded(self, record: OpRecord, options: CallOptions) -> bytes:
        """A request of which only the options are set."""
        key = (record.name, options.deterministic, options.priority, options.label, options.verify)
        found = self._options.get(key)
        if found is None:
            require_options(record, options)
            message = self._registry.requests[record.name]()
            for name in _OPTIONS if options != CallOptions() else ():
                setattr(message.options, name, getattr(options, name))
            if len(self._options) >= _MAX_OPTIONS:
                self._options.clear()
            found = self._options[key] = message.SerializeToString()
        return found

    def keep(self, prepared: Prepared, reply: Any | None) -> None:
        """Keeps the plan of a call that was answered well.

        Args:
            prepared: The call.
            reply: The message that answered it; None where it was streamed.
        """
        call, arrays = prepared.call, prepared.arrays
        if prepared.key is None:
            return
        metas = {name: meta for name, meta in call.inputs.items() if meta is not None}
        request, _ = codec.encode_request(
            call.inputs, {}, prepared.record, call.attrs, call.outputs, registry=self._registry
        )
        lengths = {name: meta.content_bytes for name, meta in metas.items()}
        chunk_from_bytes = CHUNKED_FROM_BYTES if reply is None else None
        inline = announce(request, lengths, chunk_from_bytes)
        plan = ClientPlan(
            call=call,
            expected=prepared.expected,
            nbytes=prepared.nbytes,
            are_direct=tuple(map(_is_direct, arrays, metas.values())),
            zeros=tuple(bytes(m.content_bytes) if n in prepared.unused else None for n, m in metas.items()),
            request=Template(request, "options", inline),
            follows=tuple(None if name in inline else name for name in metas),
        )
        if reply is not None:
            results = _results(prepared.record, reply)
            plan = replace(
                plan,
                reply=Template(reply, "info", {name: r[0].content_bytes for name, r in results.items() if r}),
                results=results,
            )
        self._put(prepared.key, plan)


def _is_direct(array: Array, meta: TensorMeta) -> bool:
    is_whole = array.nbytes == meta.content_bytes  # neither expanded nor unused
    return is_whole and array.flags.c_contiguous and array.dtype == meta.dtype.numpy


def _contents(plan: ClientPlan, arrays: Sequence[Array]) -> Sequence[Any]:
    """Contiguous memory for each operand that is not null; its own where that will do."""
    if all(plan.are_direct):
        return arrays
    each = zip(plan.are_direct, plan.zeros, arrays, strict=True)
    return [
        array if is_direct else layout.content(array)[1] if zero is None else memoryview(zero)
        for is_direct, zero, array in each
    ]


def _following(plan: ClientPlan, contents: Sequence[Any]) -> dict[str, memoryview]:
    """What follows the header in chunks."""
    return {
        name: _memory(each) for name, each in zip(plan.follows, contents, strict=True) if name is not None
    }


def _memory(content: Any) -> memoryview:
    return content if isinstance(content, memoryview) else layout.content(content)[1]


def _targets(record: OpRecord, out: Mapping[str, Any]) -> dict[str, Array]:
    return {
        name: _arrays.writable(value, record.name, name)
        for name, value in out.items()
        if isinstance(value, np.ndarray)
    }


def _results(record: OpRecord, reply: Any) -> dict[str, tuple[TensorMeta, np.dtype[Any]] | None]:
    results: dict[str, tuple[TensorMeta, np.dtype[Any]] | None] = {}
    for param in record.outputs:
        results[param.name] = None
        if reply.HasField(param.name):
            meta = codec.decode_meta(getattr(reply, param.name).meta, record.name, param.name)
            results[param.name] = meta, meta.dtype.numpy
    return results
