"""Phase 1 gets what the printed signatures ask for; for one operator they are the only witness.

torch_npu binds no aclnnMultiScaleDeformableAttentionGrad, so its arguments are compared with the signature,
and with what the call says of its operands. Results are SIMULATED.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.congruence.arguments import ND, elements, names, values
from tests.congruence.combinations import combinations
from tests.congruence.conftest import Answer, RunSides
from tests.congruence.signatures import SIGNATURES, CParameter
from tests.operators import MSDA
from tests.summary import Tally

from npugrad.attributes import KINDS
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord, Param, TensorParam
from npugrad.ops import OPERATORS

LEAST = 100
OUTPUTS = {"gradValue": "value", "gradLocation": "location", "gradAttnWeight": "attnWeight"}
"""Outputs of MSDA, and the operand that each is the gradient of."""


def as_c(param: Param) -> CParameter:
    """A parameter of a record as the document prints it."""
    c_type = "aclTensor*" if isinstance(param, TensorParam) else KINDS[param.type].c_type
    return CParameter(param.c_name, c_type)


@pytest.mark.parametrize("record", OPERATORS.values(), ids=OPERATORS)
def test_the_record_has_the_printed_signature(record: OpRecord) -> None:
    assert tuple(map(as_c, record.params)) == SIGNATURES[record.aclnn_name]


def described(answer: Answer) -> dict[str, TensorMeta]:
    """What the call says of each tensor, by its C name."""
    inputs = {param.c_name: answer.case.call.tensor(param.name) for param in MSDA.inputs}
    likes = {name: inputs[like] for name, like in OUTPUTS.items()}
    return inputs | {name: TensorMeta(like.dtype, like.shape) for name, like in likes.items()}


def expected_shape(name: str, meta: TensorMeta) -> list[int]:
    """Shape on the device: (bs, nq, nh * ch) is all that the operator takes of the incoming gradient."""
    shape = list(meta.shape)
    return [*shape[:2], shape[2] * shape[3]] if name == "gradOutput" and len(shape) == 4 else shape


def check_tensor(name: str, tensor: Mapping[str, Any], meta: TensorMeta) -> None:
    """The record of one tensor says of it what the call says."""
    assert (tensor["dtype"], tensor["shape"]) == (meta.dtype.acl, expected_shape(name, meta)), name
    assert (tensor["format"], tensor["offset"]) == (ND, 0), name
    assert tensor["address"] % 32 == 0, name
    asked = list(elements(meta.shape, meta.element_strides))
    assert list(elements(tensor["shape"], tensor["strides"])) == asked, name
    room = 1
    for size in tensor["storage"]:
        room *= size
    assert room == (max(asked) + 1 if asked else 0), name


@pytest.mark.npu_sim
@pytest.mark.slow
def test_deformable_attention_follows_the_signature(run_sides: RunSides, tally: Tally) -> None:
    (found,) = run_sides(MSDA.name, "service").values()
    count = 0
    for answer in found:
        assert (answer.error, len(answer.plans)) == ("", 1), answer.case.name
        (plan,) = answer.plans
        assert (plan["status"], plan["deterministic"]) == (0, int(answer.case.deterministic))
        assert names(plan) == [parameter.name for parameter in SIGNATURES[MSDA.aclnn_name]]
        metas = described(answer)
        for name, tensor in values(plan).items():
            check_tensor(name, tensor, metas[name])
            count += 1
    tally(f"{MSDA.name}, against its signature", f"{len(found)} combinations, {count} arguments, 0 differ")
    assert len(found) == len(list(combinations(MSDA.name))) >= LEAST
