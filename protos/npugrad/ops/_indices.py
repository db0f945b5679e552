"""Operands of whole numbers that say where an operator reads and writes: the check of their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npugrad.errors import UnsafeIndices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npugrad.operator import Arrays

_INT32 = np.iinfo(np.int32)


def checked(
    operator: str,
    operand: str,
    stop: Callable[[Mapping[str, Any], Mapping[str, Any]], int],
    meaning: str,
    ignored: str = "",
) -> dict[str, Any]:
    """Attributes of a record with an operand of indices, which refuse those outside a range: `UnsafeIndices`.

    Args:
        operator: Its name.
        operand: Name of the indices, whole numbers of any type.
        stop: From operands and attributes, one more than the largest; the smallest is 0.
        meaning: What `stop` is.
        ignored: An attribute with an index that is legal, too, if it fits int32, in which kernels compare.
    """

    def data_check(inputs: Arrays, attrs: Mapping[str, Any]) -> None:
        numbers, end = inputs[operand], stop(inputs, attrs)
        if numbers is None:
            return
        is_in = (numbers >= 0) & (numbers < end)
        if numbers.dtype.kind == "f":
            is_in &= numbers == np.trunc(numbers)
        allowed = f"0 to {meaning} - 1 = {end - 1}"
        if ignored and _INT32.min <= attrs[ignored] <= _INT32.max:
            is_in |= numbers == attrs[ignored]
            allowed += f", or {ignored} = {attrs[ignored]}"
        if not is_in.all():
            place = ", ".join(map(str, np.argwhere(~is_in)[0]))
            problem = f"found a number outside at [{place}]; expected {allowed}"
            raise UnsafeIndices(f"{operator}: {operand}: {problem}", operator=operator, operand=operand)

    return {"data_check": data_check, "checked_operands": (operand,), "unsafe": UnsafeIndices.default_reason}
