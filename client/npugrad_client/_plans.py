"""Plans: whatever follows from a call's signature is computed once and reused by all later calls.

A plan is kept once a server has answered a call of its signature successfully. It contains the part of that
answer that is the same in the next one, byte for byte; a different answer is read as if there were no plan.
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
"""Maximum number of plans that a client keeps, the last used; each takes some kilobytes."""
_MAX_OPTIONS = 64
"""Maximum number of encoded options that it keeps: labels are usually few, but nothing limits them."""
_OPTIONS = ("deterministic", "priority", "label", "verify")


@dataclass(frozen=True, eq=False)
class ClientPlan:
    """What follows from a call's signature.

    Attributes:
        call: Metas and attributes.
        expected: Outputs as the local record infers them; empty if not tried.
        nbytes: Bytes of data in the larger direction.
        are_direct: For each operand that is not null, whether its content is the array's memory as it is.
        zeros: For each operand that is not null, what is sent if its values are not used, else None.
        request: The request without contents and options; for a streamed call, the one in its header.
        follows: For each operand that is not null, its name if it follows the header in chunks, else None.
        reply: The reply without contents and info; None for a streamed call.
        results: Meta and NumPy dtype of the outputs by name; None for those missing from the reply.
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
        """Content of each operand that is not null, and the operands whose values are not used."""
        names = [name for name, meta in self.call.inputs.items() if meta is not None]
        found = {n: _memory(each) for n, each in zip(names, _contents(self, arrays), strict=True)}
        return found, frozenset(n for n, zero in zip(names, self.zeros, strict=True) if zero is not None)


class Plans:
    """The plans of one client.

    Thread safety: every method may be called from several threads at once. There is no lock, as a fork may
    leave one held by a thread that is gone: at worst a plan is forgotten.
    """

    def __init__(self, registry: Registry = REGISTRY) -> None:
        """Starts without plans, for calls of these operators."""
        self._registry = registry
        # Two halves: plans that are used move to the young one; when it is full, the old one is dropped.
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
        """Makes a call from the caller's arguments, like `_call.prepare`, with the same errors."""
        signature = sign(record, inputs, attrs, out, options, product)
        key, arrays = signature or (None, [])
        plan = None if key is None else self._find(key)
        if plan is None:
            made = prepare(record, inputs, attrs, out, options, product, registry=self._registry)
            if key is None or tuple(inputs) != tuple(made.call.inputs):  # contents have the record's order
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
        """The first frame of a streamed call."""
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
        """A request in which only the options are set, encoded."""
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
        """Keeps the plan of a call that was answered successfully.

        Args:
            prepared: The call.
            reply: The message that answered it; None if it was streamed.
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
    """Contiguous memory for each operand that is not null; its own memory if possible."""
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
