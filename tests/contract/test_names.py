"""The names of parameters, for every backward operator of the vendor's."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from inspect import signature

import pytest
from tests.pages import Facts, load

from npugrad import OPERATORS
from npugrad.names import RESERVED, python_name, snake_case
from npugrad.operator import OpRecord, TensorParam
from npugrad_client._generated_ops import FutureOperators, GroupNormBackwardResult

PAGES: Mapping[str, Facts] = load("9.1.0")


def test_every_page_has_names_that_are_free_and_differ() -> None:
    assert len(PAGES) >= 148
    operators = {snake_case(name.removeprefix("aclnn")): name for name in PAGES}
    assert len(operators) == len(PAGES)
    assert operators.keys() > set(OPERATORS)
    for page in PAGES.values():
        names = [python_name(p.c_name, function=page.name, is_output=p.output) for p in page.params]
        assert len({*names}) == len(names), page.name
        for name in (*names, *operators):
            assert name.isidentifier(), page.name
            assert not keyword.iskeyword(name), page.name
            assert name not in RESERVED, page.name


def test_what_is_reserved_is_what_methods_messages_and_builders_have(record: OpRecord) -> None:
    own = {param.name for param in record.params}
    method = set(signature(getattr(FutureOperators, record.name)).parameters)
    assert method - own == RESERVED - {"options", "info", "dtype", "product"}
    assert {"info"} == set(GroupNormBackwardResult.__annotations__) & RESERVED
    assert {"dtype", "product"} <= set(signature(record.build).parameters)


def test_a_taken_name_is_refused_with_the_place_of_the_table() -> None:
    with pytest.raises(ValueError, match=r"^label: found a name that is taken.*npugrad\.names$"):
        python_name("label")


def test_names_are_those_of_the_records(record: OpRecord) -> None:
    assert snake_case(record.rpc) == record.name
    for param in record.params:
        is_output = isinstance(param, TensorParam) and param.role == "output"
        name = python_name(param.c_name, function=record.aclnn_name, is_output=is_output)
        assert name == param.name
