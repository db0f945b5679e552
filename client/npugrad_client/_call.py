"""Converts the caller's arrays to calls ready to be sent, and answers to the caller's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.errors import MalformedRequest, WrongType
from npugrad.meta import TensorMeta
from npugrad.products import Product
from npugrad.registry import REGISTRY, Registry
from npugrad.validation import error_from_verdict, make_call, validate_anywhere
from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable

    import numpy.typing as npt

    from npugrad.call import CallOptions, ExecutionInfo
    from npugrad.meta import CallMeta
    from npugrad.operator import OpRecord
    from npugrad.recipe import Recipe
    from npugrad_client._plans import ClientPlan, Plans

    Array = npt.NDArray[Any]

CHUNKED_FROM_BYTES = 2**16
"""In a streamed call, operands below this length travel in the header."""
_INFER_FROM_BYTES = 2**16
"""With less operand data than this, the reply is small too: it is inferred when the first one is checked."""


@dataclass(frozen=True)
class Prepared:
    """A call ready to be sent.

    Attributes:
        record: Its operator.
        call: Metas and attributes.
        contents: Content of each operand that has one, or the recipe for it.
        options: Options of the call.
        expected: Outputs as the local record infers them; empty if not tried, or if it refuses the call.
        is_refused: Whether the local record refuses the call, whatever the product.
        targets: The caller's arrays to fill, by output.
        is_apart: Whether results must not land in `targets` as they arrive, because the call may be sent
            twice at once, or because they share memory with operands.
        unused: Operands whose values are not used: one repeated 0 is sent in their place.
        registry: Registry with its message types.
        plans: Where a plan for its signature is kept after a successful answer.
        key: Its signature; None if no plan is made for it.
        arrays: If it has a signature, the inputs that are not null, in the order given.
        plan: The plan by which it was made, if any.
        request: With a plan, the encoded request, or the encoded header of a streamed call; `contents` is
            then what follows in chunks.
    """

    record: OpRecord
    call: CallMeta
    contents: Mapping[str, memoryview | Recipe]
    options: CallOptions
    expected: Mapping[str, TensorMeta | None] = field(default_factory=dict)
    is_refused: bool = False
    targets: Mapping[str, Array] = field(default_factory=dict)
    is_apart: bool = False
    unused: frozenset[str] = frozenset()
    registry: Registry = REGISTRY
    plans: Plans | None = None
    key: Hashable = None
    arrays: Sequence[Array] = ()
    plan: ClientPlan | None = None
    request: bytes | None = None

    def apart(self) -> Prepared:
        """Returns the same call with results in new arrays."""
        return replace(self, is_apart=True)

    def without_plan(self) -> Prepared:
        """Returns the same call made without a plan, to send it in another way than planned."""
        plan = self.plan
        if plan is None:
            return self
        contents, unused = plan.contents(self.arrays)
        return replace(self, contents=contents, unused=unused, plan=None, request=None)

    def note_streamed(self) -> None:
        """Keeps a plan for its signature after it was streamed and answered successfully."""
        if self.plans is not None and self.plan is None:
            self.plans.keep(self, None)

    @property
    def nbytes(self) -> int:
        """Bytes of data in the larger direction."""
        if self.plan is not None:
            return self.plan.nbytes
        sent = sum(data.nbytes for data in self.contents.values() if isinstance(data, memoryview))
        received = sum(meta.nbytes for meta in self.expected.values() if meta is not None)
        return max(sent, received)


@dataclass(frozen=True)
class Answer:
    """Results of a call: arrays by output name, None for masked-out ones, and what produced them."""

    arrays: dict[str, Array | None]
    info: ExecutionInfo

    def after(self, tries: int) -> Answer:
        """Returns the same answer with the number of tries."""
        if tries == 1:
            return self
        return replace(self, info=replace(self.info, tries=tries).note(self.info.recorded))


def prepare(
    record: OpRecord,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    out: Mapping[str, Any] | None,
    options: CallOptions,
    product: Product | None = None,
    *,
    registry: Registry = REGISTRY,
) -> Prepared:
    """Makes a call from the caller's arguments.

    Args:
        record: The operator.
        inputs: Operands by name, None for null.
        attrs: Attributes by name.
        out: Declared outputs by name.
        options: Options of the call.
        product: Product that must accept the call; None to leave that to the server.
        registry: Registry with its message types.

    Raises:
        WrongType: An operand is not an array, `out` cannot be filled or has an unknown name, or an attribute
            is None.
        MalformedRequest: An attribute or option has the wrong type or is out of range.
        OperatorError: The documents do not allow the call on the given product.
    """
    require_options(record, options)
    packed = {n: _arrays.pack_operand(v, record.name, n) for n, v in inputs.items() if v is not None}
    declared, targets = _declare(record, out or {})
    metas = {n: packed[n][0] if n in packed else None for n in inputs}
    call = make_call(record, metas, attrs, declared, product or Product.ATLAS_A2)
    expected: Mapping[str, TensorMeta | None] | None = {}
    if product is not None:
        expected = _require_legal(record, call)
    elif sum(meta.nbytes for meta, _ in packed.values()) >= _INFER_FROM_BYTES:
        expected = infer(record, call)
    contents = {n: data for n, (_, data) in packed.items() if data is not None}
    unused = _unused(record, call, contents) if expected else frozenset()
    if unused:
        call = _shrink(call, contents, unused)
    is_apart = overlap(contents.values(), targets.values())
    is_refused = expected is None
    return Prepared(
        record, call, contents, options, expected or {}, is_refused, targets, is_apart, unused, registry
    )


def _unused(record: OpRecord, call: CallMeta, contents: Mapping[str, memoryview | Recipe]) -> frozenset[str]:
    """Operands of a legal call whose values are not used; recipes, which are short anyway, are left out."""
    return frozenset(name for name in record.unused(call) if isinstance(contents.get(name), memoryview))


def _shrink(call: CallMeta, contents: dict[str, memoryview | Recipe], unused: frozenset[str]) -> CallMeta:
    """Returns the call with unused operands as one repeated 0; changes `contents` in place."""
    sent = {}
    for name in unused:
        meta = call.tensor(name)
        sent[name] = TensorMeta(meta.dtype, meta.shape, meta.format, (0,) * meta.rank)
        contents[name] = memoryview(bytes(meta.dtype.itemsize))
    return call.with_inputs(**sent)


def require_options(record: OpRecord, options: CallOptions) -> None:
    """Raises `MalformedRequest` if an option has the wrong type or is out of range."""
    problem = options.problem()
    if problem:
        name, text = problem
        raise MalformedRequest(f"{record.name}: {name}: {text}", operator=record.name, operand=name)


def overlap(contents: Iterable[Array | memoryview | Recipe], targets: Collection[Array]) -> bool:
    """Whether results written to the caller's arrays would change an operand.

    A retry would then send the changed operand.
    """
    sent = [np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data for data in contents]
    arrays = [data for data in sent if isinstance(data, np.ndarray)]
    return any(np.may_share_memory(data, target) for target in targets for data in arrays)


def _require_legal(record: OpRecord, call: CallMeta) -> Mapping[str, TensorMeta | None]:
    """Returns the outputs of a call; raises the documented error if its product does not accept it."""
    verdict = validate_anywhere(record, call)
    if verdict.violations:
        raise error_from_verdict(record, verdict)
    return verdict.outputs


def infer(record: OpRecord, call: CallMeta) -> Mapping[str, TensorMeta | None] | None:
    """The outputs; None if no product accepts the call. The server's product and CANN are unknown here."""
    for product in dict.fromkeys((call.product, *Product)):
        verdict = validate_anywhere(record, replace(call, product=product))
        if not verdict.violations:
            return verdict.outputs
    return None


def _declare(
    record: OpRecord, out: Mapping[str, Any]
) -> tuple[dict[str, TensorMeta | None], dict[str, Array]]:
    """Splits `out` into metas to declare and arrays to fill."""
    if not isinstance(out, Mapping):
        raise WrongType(
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
    """Results for the caller: `out` arrays filled, torch tensors if operands were tensors."""
    as_torch = _arrays.has_torch(inputs.values())
    if not as_torch and not prepared.targets:
        return answer.arrays
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
