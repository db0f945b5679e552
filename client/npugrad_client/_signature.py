"""Signature of a call: everything but the values. Calls of one signature share a plan."""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.meta import TensorMeta
from npugrad_client import _arrays

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import numpy.typing as npt

    from npugrad.call import CallOptions
    from npugrad.operator import OpRecord
    from npugrad.products import Product

_PLAIN = frozenset((int, float, bool, str, type(None)))
_MAX_ATTRS_BYTES = 4096


def sign(
    record: OpRecord,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    out: Mapping[str, Any] | None,
    options: CallOptions,
    product: Product | None = None,
) -> tuple[Hashable, list[npt.NDArray[Any]]] | None:
    """Returns the signature of a call, and its inputs that are not null.

    Returns:
        A key, equal for two calls only if nothing but contents, label and priority differ, and the arrays in
        the order given. None if a value has a type that only the general path supports.
    """
    arrays: list[npt.NDArray[Any]] = []
    key: list[Hashable] = [record.name, product, tuple(inputs), tuple(attrs)]
    for name, value in inputs.items():
        if value is None:
            key.append(None)
            continue
        if type(value) is not np.ndarray:
            if not _arrays.is_torch(value):
                return None
            try:
                value = _arrays.to_numpy(value, record.name, name)
            except TypeError:  # the general path reports what is wrong
                return None
        arrays.append(value)
        key.append((value.dtype, value.shape, value.strides))
    values = (options.deterministic, options.verify, *attrs.values())
    if not _is_plain(values) or type(options.priority) is not int or type(options.label) is not str:
        return None
    # Its bytes distinguish True from 1, 1 from 1.0 and 0.0 from -0.0, which compare equal.
    packed = marshal.dumps(values, 2)
    if len(packed) > _MAX_ATTRS_BYTES:
        return None
    key.append(packed)
    if out is not None and not _declare(out, key):
        return None
    return tuple(key), arrays


def _is_plain(values: tuple[Any, ...]) -> bool:
    """Whether `marshal` preserves the types of the values: it writes those of NumPy as bytes."""
    for value in values:
        if type(value) in _PLAIN:
            continue
        if type(value) not in (tuple, list) or not _PLAIN.issuperset(map(type, value)):
            return False
    return True


def _declare(out: Mapping[str, Any], key: list[Hashable]) -> bool:
    """Adds declared outputs to a key; returns False if they need the general path."""
    if type(out) is not dict:
        return False
    for name, value in out.items():
        key.append(name)
        if type(value) is np.ndarray:
            key.append((np.ndarray, value.dtype, value.shape))
        elif value is None or type(value) is TensorMeta:
            key.append(value)
        else:
            return False
    return True
