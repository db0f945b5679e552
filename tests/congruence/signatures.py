"""The C signatures of phase 1, as the official documents print them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PROTOTYPES = """
aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
    const aclTensor* value, const aclTensor* spatialShape, const aclTensor* levelStartIndex,
    const aclTensor* location, const aclTensor* attnWeight, const aclTensor* gradOutput,
    aclTensor* gradValue, aclTensor* gradLocation, aclTensor* gradAttnWeight,
    uint64_t* workspaceSize, aclOpExecutor** executor)
aclnnGridSampler2DBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* input, const aclTensor* grid,
    int64_t interpolationMode, int64_t paddingMode, bool alignCorners, const aclBoolArray* outputMask,
    aclTensor* inputGrad, aclTensor* gridGrad, uint64_t* workspaceSize, aclOpExecutor** executor)
aclnnGroupNormBackwardGetWorkspaceSize(
    const aclTensor* gradOut, const aclTensor* input, const aclTensor* mean, const aclTensor* rstd,
    const aclTensor* gamma, int64_t N, int64_t C, int64_t HxW, int64_t group,
    const aclBoolArray* outputMask, aclTensor* gradInput, aclTensor* gradGammaOut, aclTensor* gradBetaOut,
    uint64_t* workspaceSize, aclOpExecutor** executor)
aclnnFusedFloydAttentionGradGetWorkspaceSize(
    const aclTensor* query, const aclTensor* key1, const aclTensor* value1, const aclTensor* key2,
    const aclTensor* value2, const aclTensor* dy, const aclTensor* attenMaskOptional,
    const aclTensor* softmaxMax, const aclTensor* softmaxSum, const aclTensor* attentionIn,
    double scaleValue, const aclTensor* dqOut, const aclTensor* dk1Out, const aclTensor* dv1Out,
    const aclTensor* dk2Out, const aclTensor* dv2Out, uint64_t* workspaceSize, aclOpExecutor** executor)
aclnnLayerNormBackwardGetWorkspaceSize(
    const aclTensor* gradOut, const aclTensor* input, const aclIntArray* normalizedShape,
    const aclTensor* mean, const aclTensor* rstd, const aclTensor* weightOptional,
    const aclTensor* biasOptional, const aclBoolArray* outputMask, aclTensor* gradInputOut,
    aclTensor* gradWeightOut, aclTensor* gradBiasOut, uint64_t* workspaceSize, aclOpExecutor** executor)
aclnnGridSampler3DBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* input, const aclTensor* grid,
    int64_t interpolationMode, int64_t paddingMode, bool alignCorners, const aclBoolArray* outputMask,
    aclTensor* inputGrad, aclTensor* gridGrad, uint64_t* workspaceSize, aclOpExecutor** executor)
"""


@dataclass(frozen=True)
class CParameter:
    """One parameter."""

    name: str
    type: str


def _parameter(text: str) -> CParameter:
    kind, name = re.fullmatch(r"(?:const )?(\w+\**) (\w+)", text.strip()).groups()  # type: ignore[union-attr]
    return CParameter(name, kind)


def _parse(text: str) -> Mapping[str, tuple[CParameter, ...]]:
    found = {}
    for op, parameters in re.findall(r"(\w+)GetWorkspaceSize\(([^)]*)\)", text):
        *own, size, executor = [_parameter(" ".join(part.split())) for part in parameters.split(",")]
        assert (size.type, executor.type) == ("uint64_t*", "aclOpExecutor**")
        found[op] = tuple(own)
    return found


SIGNATURES = _parse(PROTOTYPES)
"""Parameters of each operator in C order, without the last two, which all have."""
