"""One call on its way: from the caller's arrays to what is sent, and from what came back to results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.errors import MalformedRequest
from npugrad.meta import TensorMeta
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.validation import make_call, validate_call
from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy.typing as npt

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.recipe import Recipe

    Array = npt.NDArray[Any]

_INFER_FROM_BYTES = 2**16
"""Below this much operand data a reply is small as well: no need to infer it to choose how to send."""


@dataclass(frozen=True)
class Prepared:
    """A call ready to be sent.

    Attributes:
        record: Its operator.
        call: Metas and attributes.
        contents: Content of each operand that has one, or the recipe for it.
        options: Options of the call.
        expected: Outputs as the local record infers them; empty when that was not tried, or it refuses.
        is_refused: Whether the local record refuses the call, whatever the product.
        targets: Arrays of the caller that are to be filled, by output.
        is_apart: Whether results must not land in `targets` as they arrive, because the call may be sent
            twice at once, or because they share memory with operands.
        registry: Where its messages are.
    """

    record: OpRecord
    call: CallMeta
    contents: Mapping[str, memoryview | Recipe]
    options: CallOptions
    expected: Mapping[str, TensorMeta | None] = field(default_factory=dict)
    is_refused: bool = False
    targets: Mapping[str, Array] = field(default_factory=dict)
    is_apart: bool = False
    registry: Registry = REGISTRY

    def apart(self) -> Prepared:
        """The same call, whose results land in arrays of their own."""
        return replace(self, is_apart=True)

    @property
    def nbytes(self) -> int:
        """Bytes of data in the larger direction."""
        sent = sum(data.nbytes for data in self.contents.values() if isinstance(data, memoryview))
        received = sum(meta.nbytes for meta in self.expected.values() if meta is not None)
        return max(sent, received)


@dataclass(frozen=True)
class Answer:
    """Results of a call: arrays by output name, None for masked-out ones, and what produced them."""

    arrays: dict[str, Array | None]
    info: ExecutionInfo

    def after(self, tries: int) -> Answer:
        """The same answer, with how often the call was sent."""
        return self if tries == 1 else replace(self, info=replace(self.info, tries=tries))


def prepare(
    record: OpRecord,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    out: Mapping[str, Any] | None,
    options: CallOptions,
    *,
    registry: Registry = REGISTRY,
) -> Prepared:
    """Makes a call from what the caller gave.

    Raises:
        TypeError: An operand is no array, `out` cannot be filled or names no output, an attribute is None.
        MalformedRequest: An attribute or option is of the wrong type or out of range.
    """
    problem = options.problem()
    if problem:
        name, text = problem
        raise MalformedRequest(f"{record.name}: {name}: {text}", operator=record.name, operand=name)
    packed = {n: _arrays.pack_operand(v, record.name, n) for n, v in inputs.items() if v is not None}
    declared, targets = _declare(record, out or {})
    call = make_call(record, {n: packed[n][0] if n in packed else None for n in inputs}, attrs, declared)
    expected: Mapping[str, TensorMeta | None] | None = {}
    if sum(meta.nbytes for meta, _ in packed.values()) >= _INFER_FROM_BYTES:
        expected = _infer(record, call)
    contents = {n: data for n, (_, data) in packed.items() if data is not None}
    if expected:
        call = _shrink(record, call, contents)
    is_apart = _overlap(contents.values(), targets.values())
    is_refused = expected is None
    return Prepared(record, call, contents, options, expected or {}, is_refused, targets, is_apart, registry)


def _shrink(record: OpRecord, call: CallMeta, contents: dict[str, memoryview | Recipe]) -> CallMeta:
    """The call with operands of which no value is used as one repeated 0, in `contents` as well.

    Args:
        record: The operator.
        call: A legal call.
        contents: Content of its operands, changed in place. A recipe is short as it is.
    """
    sent = {}
    for name in record.unused(call):
        meta = call.tensor(name)
        if isinstance(contents.get(name), memoryview):
            sent[name] = TensorMeta(meta.dtype, meta.shape, meta.format, (0,) * meta.rank)
            contents[name] = memoryview(bytes(meta.dtype.itemsize))
    return call.with_inputs(**sent)


def _overlap(contents: Iterable[memoryview | Recipe], targets: Collection[Array]) -> bool:
    """Whether results that land in an array of the caller would change an operand.

    It is sent again when the call is.
    """
    sent = [np.frombuffer(data, np.uint8) for data in contents if isinstance(data, memoryview)]
    return any(np.may_share_memory(data, target) for target in targets for data in sent)


def _infer(record: OpRecord, call: CallMeta) -> Mapping[str, TensorMeta | None] | None:
    """The outputs; None when no product takes the call. Which one the server serves is not known here."""
    for product in dict.fromkeys((call.product, *Product)):
        verdict = validate_call(record, replace(call, product=product))
        if not verdict.violations:
            return verdict.outputs
    return None


def _declare(
    record: OpRecord, out: Mapping[str, Any]
) -> tuple[dict[str, TensorMeta | None], dict[str, Array]]:
    """Splits `out` into metas to declare and arrays to fill."""
    if not isinstance(out, Mapping):
        raise TypeError(
            f"{record.name}: out: found {type(out).__name__}; expected a mapping of outputs by name"
        )
    declared: dict[str, TensorMeta | None] = {}
    targets: dict[str, Array] = {}
    for name, value in out.items():
        if value is None or isinstance(value, TensorMeta):
            declared[name] = value
        else:
            targets[name] = array = _arrays.writable(value, record.name, name)
            declared[name] = TensorMeta(array.dtype, array.shape)
    return declared, targets


def finish(
    prepared: Prepared, answer: Answer, inputs: Mapping[str, Any], out: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Results as the caller wants them: his own arrays filled, torch tensors where he gave some."""
    as_torch = any(_arrays.is_torch(value) for value in inputs.values())
    results: dict[str, Any] = {}
    for name, array in answer.arrays.items():
        target = prepared.targets.get(name)
        if array is None:
            results[name] = None
        elif target is None:
            results[name] = _arrays.to_torch(array) if as_torch else array
        else:
            if array is not target:
                target[...] = array
            results[name] = (out or {})[name]
    return results
