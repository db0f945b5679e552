"""What `OpRecord.reaches` says of a call, held against what computes: reference, kernel, simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from npugrad import OPERATORS, Product
from npugrad.errors import UnsafeIndices, UnsafeLevels
from npugrad.layout import view
from npugrad.meta import CallMeta
from npugrad.operator import OpRecord
from npugrad.recipe import recipes

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array | None]
Compute = Callable[[OpRecord, CallMeta, Arrays], Mapping[str, Array]]

MASK = "output_mask"
_LARGE_BYTES = 2**18


def every_sample(*, with_large: bool = True) -> Iterator[Any]:
    """Each sample of each record as pytest parameters `record`, `call`; large ones are slow."""
    for record in OPERATORS.values():
        for sample in record.samples(Product.ATLAS_A2):
            is_large = any(meta and meta.nbytes > _LARGE_BYTES for meta in sample.call.inputs.values())
            if with_large or not is_large:
                marks = [pytest.mark.slow] if is_large else []
                yield pytest.param(record, sample.call, marks=marks, id=f"{record.name}-{sample.name}")


def unlike_samples(record: OpRecord) -> Iterator[CallMeta]:
    """Of samples that differ in types, sizes and masks alone there is one: the first two reach nothing."""
    alike = set()
    for sample in record.samples(Product.ATLAS_A2):
        call = sample.call
        there = [meta and bool(meta.size) for meta in call.inputs.values()]
        attrs = {n: v is None if n == MASK else v for n, v in call.attrs.items() if n != "scale_value"}
        if str((there, attrs)) not in alike:
            alike.add(str((there, attrs)))
            yield call


def masked(record: OpRecord, call: CallMeta) -> Iterator[CallMeta]:
    """A call under every mask of its outputs; as it is where it has none, or a null one."""
    count = sum(param.masked_by is not None for param in record.outputs)
    if not count or call.attrs[MASK] is None:
        yield call
        return
    for bits in np.ndindex((2,) * count):
        yield call.with_attrs(**{MASK: tuple(map(bool, bits))})


def prove(record: OpRecord, call: CallMeta, compute: Compute) -> None:
    """No bit of an output depends on an operand that does not reach it; on each that does, some bit does.

    Args:
        record: The operator.
        call: A legal call.
        compute: Gives the wanted outputs of the call.
    """
    reaches = record.reaches(call)
    contents, other = _contents(record, call, 0), _contents(record, call, 100)

    def results(changes: Mapping[str, Array]) -> dict[str, bytes]:
        arrays = _arrays(call, {**contents, **changes})
        record.data_check(arrays, call.attrs)
        return {name: array.tobytes() for name, array in compute(record, call, arrays).items()}

    before = results({})
    assert reaches.keys() == contents.keys()
    assert all(outputs <= before.keys() for outputs in reaches.values())

    def changed(changes: Mapping[str, Array]) -> set[str]:
        try:
            return {name for name, bits in results(changes).items() if bits != before[name]}
        except (UnsafeIndices, UnsafeLevels):
            return {*before}

    for operands, outputs in _unreached(reaches, before).items():
        for values in ("others", "nan", "inf"):
            wrong = outputs & changed({name: _filled(other[name], values) for name in operands})
            assert not wrong, f"{values} in one of {sorted(operands)} changed {sorted(wrong)}: {call}"
    for name, reached in reaches.items():
        unshown = set(reached)
        # What is checked may do no more than have the call refused, because another operand has no elements.
        for values in ("others", "zeros", "ones", *["inf"] * (name in record.checked_operands)):
            unshown -= changed({name: _filled(other[name], values)}) if unshown else set()
        assert not unshown, f"{name} changed none of {sorted(unshown)}: {call}"


def _unreached(
    reaches: Mapping[str, frozenset[str]], outputs: Mapping[str, bytes]
) -> dict[frozenset[str], set[str]]:
    """Outputs by the operands that do not reach them, so that one call shows it of them all."""
    found: dict[frozenset[str], set[str]] = {}
    for output in outputs:
        operands = frozenset(name for name, reached in reaches.items() if output not in reached)
        if operands:
            found.setdefault(operands, set()).add(output)
    return found


def _contents(record: OpRecord, call: CallMeta, seed: int) -> dict[str, Array]:
    """All elements of each operand's content, drawn independently of each other; level tables as they are."""
    given = {name: meta for name, meta in call.inputs.items() if meta is not None}
    drawn = recipes(record, call, seed)
    rest = record.make_inputs(call, np.random.default_rng(seed)) if drawn.keys() < given.keys() else {}
    found = {}
    for name, meta in given.items():
        found[name] = content = np.zeros(meta.content_bytes // meta.dtype.itemsize, meta.dtype.numpy)
        if name not in drawn:
            view(meta, content.view(np.uint8).data)[...] = rest[name]
        elif content.size:
            drawn[name].fill(content.view(np.uint8).data)
    return found


def _arrays(call: CallMeta, contents: Mapping[str, Array]) -> dict[str, Array | None]:
    return {
        name: None if meta is None else view(meta, contents[name].view(np.uint8).data)
        for name, meta in call.inputs.items()
    }


def _filled(drawn: Array, values: str) -> Array:
    """Content of the same length: as drawn, with NaNs in it, or full of values of one kind.

    Integers have an extreme of their type for NaN and infinity.
    """
    if values == "others":
        return drawn
    if drawn.dtype.kind in "biu":
        limits = (0, 1) if drawn.dtype == bool else (np.iinfo(drawn.dtype).min, np.iinfo(drawn.dtype).max)
        number = {"zeros": 0, "ones": 1, "inf": limits[0], "nan": limits[1]}[values]
        return np.full_like(drawn, number)
    if values == "nan":
        filled = drawn.copy()
        filled[::3] = np.nan
        return filled
    filled = np.full_like(drawn, {"zeros": 0.0, "ones": 1.0, "inf": np.inf}[values])
    if values == "inf":
        filled[1::2] = -np.inf
    return filled
