"""What the generators make of every kind of attribute."""

from __future__ import annotations

import inspect

import pytest
from tests.synthetic.client import GENERATED, SOURCE
from tests.synthetic.record import SYNTHETIC

from npugrad._tools import gen_docs
from npugrad.attributes import KINDS


@pytest.mark.parametrize("owner", ["Operators", "AsyncOperators", "FutureOperators"])
def test_methods_take_each_kind_and_leave_out_what_is_optional(owner: str) -> None:
    parameters = inspect.signature(getattr(GENERATED, owner).synthetic).parameters
    for param in SYNTHETIC.attrs:
        found = parameters[param.name]
        assert found.annotation == KINDS[param.type].annotation, param.name
        assert found.default is (None if param.optional else inspect.Parameter.empty), param.name
        assert found.kind is inspect.Parameter.KEYWORD_ONLY


def test_the_text_says_what_may_be_none_and_shows_a_call() -> None:
    text = inspect.getdoc(GENERATED.Operators.synthetic) or ""
    assert "sizes: One.\n" in text
    assert "sizes_optional: One. May be None.\n" in text
    assert "alpha=Scalar('bfloat16', 1.5)" in text
    assert 'mode="sum"' in text


def test_a_name_is_imported_where_a_kind_needs_it() -> None:
    assert SOURCE.count("from npugrad.attributes import Scalar") == 1


def test_tables_say_the_kind_of_each_attribute() -> None:
    found = {param.name: gen_docs._kind(param) for param in SYNTHETIC.params}
    assert (found["sizes"], found["sizes_optional"]) == ("int64_array", "int64_array, may be null")
    assert (found["level"], found["alpha"], found["mode"]) == ("int8", "scalar", "string")
    assert (found["input"], found["seen"]) == ("input", "output")
