"""Illegal calls, each breaking one constraint, exactly as passed to the first phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npugrad.errors import MalformedTensor
from npugrad.meta import TensorMeta
from npugrad.operator import TensorParam
from npugrad_server.acl.layout import arrange
from npugrad_server.backends.npu.trials.exchange import RawCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npugrad.meta import CallMeta
    from npugrad.operator import Constraint, OpRecord
    from npugrad.products import Product


@dataclass(frozen=True)
class IllegalCall:
    """A sample changed to break one constraint.

    Attributes:
        sample: Name of the sample.
        call: The broken call.
        case: All its tensors as passed to the first phase.
        by_worker: Whether a worker passes exactly these tensors, and so can be asked as well.
    """

    sample: str
    call: CallMeta
    case: RawCall
    by_worker: bool


def illegal_calls(record: OpRecord, product: Product, constraint: Constraint) -> Iterator[IllegalCall]:
    """Yields every sample that can be changed to break a constraint, on a device of the product."""
    for sample in record.samples(product):
        broken = constraint.violate(sample.call)
        # Another product would need another chip, and a call accepted unchecked breaks nothing.
        if broken is None or broken.product is not product or record.accepts_unchecked(broken):
            continue
        case = as_handed_down(record, broken, sample.call)
        yield IllegalCall(sample.name, broken, case, _is_what_a_worker_sends(record, broken, case))


def as_handed_down(record: OpRecord, call: CallMeta, legal: CallMeta) -> RawCall:
    """Returns every tensor of a possibly illegal call, with formats, strides and declared outputs unchanged.

    Args:
        record: The operator.
        call: The call.
        legal: The legal call it was made from, whose outputs replace those that cannot be inferred.
    """
    tensors: dict[str, TensorMeta | None] = {}
    for param in record.params:
        if isinstance(param, TensorParam):
            if param.role == "input":
                meta, own = call.inputs[param.name], legal.inputs[param.name]
            else:
                meta, own = _output(record, param, call, legal), None
            tensors[param.name] = _viewed(param, meta, own)
    return RawCall(record.name, call.attrs, tensors)


def _viewed(param: TensorParam, meta: TensorMeta | None, legal: TensorMeta | None) -> TensorMeta | None:
    """Returns a tensor in the shape the device wants, unless the shape is what is illegal."""
    if meta is None or param.device_view is None or (legal is not None and meta.shape != legal.shape):
        return meta
    return TensorMeta(meta.dtype, param.device_view(meta), meta.format)


def _output(record: OpRecord, param: TensorParam, call: CallMeta, legal: CallMeta) -> TensorMeta | None:
    if call.is_null_output(param.name):
        return None
    declared = call.declared(param.name)
    if declared is not None or (_is_masked(param, call) and param.when_masked == "null"):
        return declared
    for given in (call, legal):
        try:
            found = record.infer(_unmasked(record, given))[param.name]
        except (KeyError, ValueError, IndexError, MalformedTensor):  # what it is inferred from is broken
            continue
        return found
    return None


def _is_masked(param: TensorParam, call: CallMeta) -> bool:
    if param.masked_by is None:
        return False
    mask = call.attrs["output_mask"]
    return not (isinstance(mask, tuple) and len(mask) > param.masked_by and mask[param.masked_by])


def _unmasked(record: OpRecord, call: CallMeta) -> CallMeta:
    count = sum(param.masked_by is not None for param in record.outputs)
    return call.with_attrs(output_mask=(True,) * count) if count else call


def _is_what_a_worker_sends(record: OpRecord, call: CallMeta, case: RawCall) -> bool:
    """Whether a worker sends exactly these; it normalizes formats, shapes and outputs, so often it cannot."""
    if call.outputs:
        return False  # a worker is not told of declared outputs
    try:
        if not any(record.infer(call).values()):
            return False  # no output is wanted, so a worker does not ask the device
        arranged = arrange(record, call)
    except Exception:  # pure functions of a record, given what they need not accept
        return False
    sent = {slot.name: slot.meta for slot in arranged.inputs + arranged.outputs}
    return all(_alike(sent.get(name), meta) for name, meta in case.tensors.items())


def _alike(one: TensorMeta | None, other: TensorMeta | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (one.is_contiguous and other.is_contiguous and one == other.contiguous())
