"""What is printed for people, from records made by hand."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from npugrad.dtypes import DType
from npugrad_client import OperatorInfo
from npugrad_client._cli import show
from npugrad_client._info import ParameterInfo


def printed(show_it: Callable[[Console], None]) -> list[str]:
    """The lines that one function prints."""
    target = io.StringIO()
    show_it(Console(file=target, width=200))
    return target.getvalue().splitlines()


@pytest.mark.parametrize(
    ("dtypes", "supported", "first", "types"),
    [
        ((DType.FLOAT32,), True, "some_grad: aclnnSomeGrad", "types: float32;"),
        (
            (DType.FLOAT32, DType.FLOAT16),
            False,
            "some_grad: aclnnSomeGrad, NOT on the server's devices; a call returns the reason",
            "types: float32, float16;",
        ),
        ((), False, "some_grad: aclnnSomeGrad, NOT on this product", "types: none;"),
    ],
)
def test_an_operator_that_is_not_there_is_told_with_who_lacks_it(
    dtypes: tuple[DType, ...], supported: bool, first: str, types: str
) -> None:
    """A product without the operator gives its operands no types; a node without its functions does."""
    operand = ParameterInfo("grad", "grad", "input", "(N)", dtypes, optional=False)
    operator = OperatorInfo("some_grad", "aclnnSomeGrad", "Gradients.", (operand,), (), supported, "9.0")
    lines = printed(lambda console: show.operators(console, (operator,)))
    assert lines[0] == first
    assert lines[2].strip().startswith(types)
