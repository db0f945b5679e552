"""C types of both phases, against the signatures of the documents."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_double, c_int32, c_int64, c_uint64, c_void_p

import pytest

from npugrad.ops import OPERATORS
from npugrad_server.acl.symbols import DEVICE, RUNTIME, TENSORS, Symbol, operator_symbols

# The C signatures of the vendor's headers: const aclTensor* and aclBoolArray* are T, int64_t is I, double is
# D, bool is B. Then come workspaceSize and executor.
SIGNATURES = {
    "aclnnMultiScaleDeformableAttentionGrad": "TTTTTT TTT",
    "aclnnGridSampler2DBackward": "TTT II B T TT",
    "aclnnGroupNormBackward": "TTTTT IIII T TTT",
    "aclnnFusedFloydAttentionGrad": "TTTTTT T TT T D TTTTT",
}
TYPES = {"T": c_void_p, "I": c_int64, "D": c_double, "B": c_bool}


def test_the_operators_are_those_with_a_known_signature() -> None:
    assert {record.aclnn_name for record in OPERATORS.values()} == set(SIGNATURES)


@pytest.mark.parametrize("name", OPERATORS)
def test_both_phases_have_the_types_of_the_headers(name: str) -> None:
    record = OPERATORS[name]
    plan, launch = operator_symbols(record)
    expected = [TYPES[letter] for letter in SIGNATURES[record.aclnn_name].replace(" ", "")]
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
