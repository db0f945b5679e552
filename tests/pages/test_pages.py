"""What was parsed from the vendor's pages equals what a person reads on them."""

from __future__ import annotations

import re

import pytest
from tests.pages import RELEASES, load

from npugrad import DType, Product
from npugrad.attributes import KINDS

PRODUCTS = {"t": Product.ATLAS_TRAINING, "2": Product.ATLAS_A2, "3": Product.ATLAS_A3}
DTYPES = {
    **{"F": DType.FLOAT32, "H": DType.FLOAT16, "B": DType.BFLOAT16, "D": DType.FLOAT64, "?": DType.BOOL},
    **{"s": DType.INT8, "S": DType.INT16, "I": DType.INT32, "L": DType.INT64, "U": DType.UINT8},
}
# Read on the pages of 9.1.0: products, rows of each return code, determinism; then the names of parameters by
# their kind, for tensors their ranks and types. A "*" marks an output and a "?" one that may be null.
BY_HAND: dict[str, tuple[str, dict[int, int], str | None, dict[str, str]]] = {
    "ConvolutionBackward": (
        "t23",
        {161001: 1, 161002: 6, 561103: 1},
        "option",
        {
            "- t:FH 23:FHB": "gradOutput input weight gradInput* gradWeight* gradBias*",
            "int64_array": "biasSizes stride padding dilation outputPadding",
            "bool": "transposed",
            "int32": "groups",
            "bool_array": "outputMask",
            "int8": "cubeMathType",
        },
    ),
    "MaxPool2dWithIndicesBackward": (
        "23",
        {161001: 1, 161002: 10},
        "option",
        {
            "3-4 F": "gradOutput self",
            "3-4 I": "indices",
            "3-4 FHB": "gradInput*",
            "int64_array": "kernelSize stride padding dilation",
            "bool": "ceilMode",
        },
    ),
    "EmbeddingDenseBackward": (
        "t23",
        {161001: 1, 161002: 4},
        None,
        {
            "2-8 t:FH 23:FHB": "grad",
            "1-8 FHDsSILU?": "indices",
            "2-2 t:FH 23:FHB": "out*",
            "uint64": "numWeights paddingIdx",
            "bool": "scaleGradByFreq",
        },
    ),
    "NLLLossBackward": (
        "t23",
        {161001: 1, 161002: 4},
        "default",
        {
            "- FHB": "gradOutput self out*",
            "- ILU": "target",
            "1-1 FHB": "weight totalWeight",
            "int64": "reduction ignoreIndex",
        },
    ),
    "SoftmaxBackward": (
        "t23",
        {161001: 1, 161002: 4},
        "default",
        {"0-8 FHB": "gradOutput output out*", "int64": "dim"},
    ),
    "BatchNormBackward": (
        "t23",
        {161001: 4, 161002: 10},
        "option",
        {
            "2-8 t:FH 23:FHB": "gradOut input gradInput*",
            "1-1 t:FH 23:FHB": "weight? runningMean? runningVar? saveMean? saveInvstd? gradWeight* gradBias*",
            "bool": "training",
            "double": "eps",
            "bool_array": "outputMask",
        },
    ),
    "FlashAttentionScoreGrad": (
        "23",
        {161001: 1, 161002: 2},
        "option",
        {
            "3-4 FHB": "query keyIn value dy attentionInOptional? dqOut* dkOut* dvOut*",
            "4-4 FHB": "pseShiftOptional?",
            "0-1 U": "dropMaskOptional?",
            "2-4 U?": "attenMaskOptional?",
            "4-4 F": "softmaxMaxOptional? softmaxSumOptional?",
            "- ": "paddingMaskOptional? softmaxInOptional? dpseOut*",
            "int64_array": "prefixOptional?",
            "double": "scaleValue keepProb",
            "int64": "preTokens nextTokens headNum innerPrecise sparseMode",
            "string": "inputLayout",
        },
    ),
    "UpsampleNearest2dBackward": (
        "t23",
        {161001: 1, 161002: 9},
        "default",
        {
            "4-4 t:H 23:FHB": "gradOut gradInput*",
            "int64_array": "outputSize inputSize",
            "double": "scalesH scalesW",
        },
    ),
    "RmsNormGrad": (
        "23",
        {161001: 1, 161002: 1, 561002: 1},
        "option",
        {
            "2-8 FHB": "dy x dxOut*",
            "1-7 F": "rstd dgammaOut*",
            "1-7 FHB": "gamma",
        },
    ),
    "GeluBackwardV2": (
        "t23",
        {161001: 1, 161002: 5},
        "default",
        {"0-8 t:FH 23:FHB": "gradOutput self gradInput*", "string": "approximate"},
    ),
}


def _types(text: str, products: str) -> dict[Product, set[DType]]:
    """Types by product of ``t:FH 23:FHB``, or of ``FHB`` for all."""
    parts = [part.split(":") for part in text.split()] if ":" in text else [[products, text.strip()]]
    return {
        PRODUCTS[letter]: {DTYPES[each] for each in names} for letters, names in parts for letter in letters
    }


@pytest.mark.parametrize("name", BY_HAND)
def test_a_page_says_what_a_person_reads_on_it(name: str) -> None:
    products, codes, determinism, params = BY_HAND[name]
    facts = load("9.1.0")[f"aclnn{name}"]
    assert (list(facts.products), facts.determinism) == ([PRODUCTS[each] for each in products], determinism)
    assert facts.codes == codes
    expected = {}
    for kind, names in params.items():
        ranks, _, types = kind.partition(" ")
        is_tensor = kind not in KINDS
        for each in names.split():
            expected[each.strip("*?")] = (
                "tensor" if is_tensor else kind,
                "*" in each,
                "?" in each,
                tuple(map(int, ranks.split("-"))) if is_tensor and ranks != "-" else None,
                _types(types, products) if is_tensor else {},
            )
    found = {
        each.c_name: (
            each.type, each.output, each.optional, each.ranks,
            {product: set(dtypes) for product, dtypes in each.dtypes.items()},
        )
        for each in facts.params
    }  # fmt: skip
    assert found == expected
    assert [part.split()[-1] for part in facts.prototype.split(", ")] == list(found)


def test_every_file_says_where_its_pages_stand() -> None:
    for release in RELEASES:
        pages = load(release)
        assert list(pages) == sorted(pages)
        assert len(pages) >= (148 if release == "9.1.0" else 11)
        for facts in pages.values():
            assert facts.path.endswith(f"/docs/{facts.name}.md")
            assert re.fullmatch("[0-9a-f]{64}", facts.sha256)
            assert re.fullmatch("[0-9a-f]{40}|master|" + re.escape(release), facts.commit)
