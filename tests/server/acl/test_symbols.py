"""C types of both phases, against the signatures of the documents."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_double, c_int32, c_int64, c_uint64, c_void_p

import pytest
from tests.congruence.signatures import SIGNATURES

from npugrad.ops import OPERATORS
from npugrad_server.acl.symbols import DEVICE, RUNTIME, TENSORS, Symbol, operator_symbols

TYPES = {"int64_t": c_int64, "double": c_double, "bool": c_bool}
"""What signatures have beside pointers."""


def test_the_operators_are_those_with_a_known_signature() -> None:
    assert {record.aclnn_name for record in OPERATORS.values()} == set(SIGNATURES)


@pytest.mark.parametrize("name", OPERATORS)
def test_both_phases_have_the_types_of_the_headers(name: str) -> None:
    record = OPERATORS[name]
    plan, launch = operator_symbols(record)
    expected = [TYPES.get(parameter.type, c_void_p) for parameter in SIGNATURES[record.aclnn_name]]
    assert plan.name == f"{record.aclnn_name}GetWorkspaceSize"
    assert list(plan.arguments) == [*expected, POINTER(c_uint64), POINTER(c_void_p)]
    assert launch.name == record.aclnn_name
    assert launch.arguments == (c_void_p, c_uint64, c_void_p, c_void_p)
    assert (plan.result, launch.result) == (c_int32, c_int32)
    assert plan.since == launch.since == record.min_cann


@pytest.mark.parametrize("symbol", RUNTIME + DEVICE + TENSORS, ids=lambda symbol: symbol.name)
def test_every_function_has_types_that_keep_pointers_whole(symbol: Symbol) -> None:
    types = [*symbol.arguments, symbol.result]
    assert all(isinstance(kind, type) for kind in types)
    assert ctypes.sizeof(c_bool) == 1
