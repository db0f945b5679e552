"""Recipes as values: contents, digests, the wire, and that every record's own make legal, finite calls."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np
import pytest

from npugrad import codec
from npugrad.errors import InvalidRecipe, MalformedTensor
from npugrad.generators import Draw
from npugrad.meta import TensorMeta
from npugrad.operator import OpRecord
from npugrad.ops import OPERATORS, get_operator
from npugrad.products import Product
from npugrad.recipe import MAX_SEED, Recipe, recipes
from npugrad.validation import validate_call

A2 = Product.ATLAS_A2


def test_array_has_shape_and_type_and_is_the_content() -> None:
    recipe = Recipe("uniform", shape=(3, 5), dtype="bfloat16", seed=9, low=-1)
    array = recipe.array()
    assert (array.shape, str(array.dtype)) == ((3, 5), "bfloat16")
    assert array.tobytes() == bytes(recipe.content())
    assert array.astype(np.float32).min() < 0


def test_strides_repeat_one_element() -> None:
    recipe = Recipe("normal", shape=(4, 8), dtype="float32", strides=(1, 0))
    assert recipe.meta.content_bytes == 16
    assert np.array_equal(recipe.array(), np.repeat(recipe.array()[:, :1], 8, axis=1))


@pytest.mark.parametrize("shape", [(), (0, 3), (600_001,)])
def test_digest_is_that_of_the_content(shape: tuple[int, ...]) -> None:
    recipe = Recipe("normal", shape=shape, dtype="float32", seed=2)
    expected = hashlib.sha256(recipe.content()).digest()
    assert recipe.sha256() == expected
    assert recipe.with_digest() == Recipe("normal", shape=shape, seed=2, digest=expected)


def test_recipes_can_be_pickled_and_compared() -> None:
    recipe = Recipe("normal", shape=(2,), seed=np.int64(4), std=2)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe != Recipe("normal", shape=(2,), seed=5, std=2)
    assert str(recipe) == "normal(mean=0, std=2) as float32[2], seed 4"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"generator": "gauss"}, "recipe: found generator 'gauss'; expected one of uniform, normal"),
        ({"seed": -1}, "found seed -1; expected 0 to 18446744073709551615"),
        ({"seed": MAX_SEED + 1}, "found seed 18446744073709551616"),
        ({"digest": b"x"}, "found a digest of 1 bytes; expected 32, or none"),
        ({"std": -1}, "found std -1 of normal"),
        ({"repeat": 0}, "found repeat 0"),
        ({"dtype": "complex64"}, "found dtype complex64"),
    ],
)
def test_nothing_that_cannot_be_made(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRecipe, match=problem) as caught:
        Recipe(**{"generator": "normal", "shape": (2,), **arguments})
    assert caught.value.reason == "RECIPE_INVALID"


def test_other_mistakes_are_wrong_usage() -> None:
    with pytest.raises(TypeError, match="unknown parameter 'low' of normal; known are mean, std"):
        Recipe("normal", shape=(2,), low=0)
    with pytest.raises(MalformedTensor, match="expected sizes of 0 or more"):
        Recipe("normal", shape=(-2,))
    with pytest.raises(ValueError, match="unknown dtype"):
        Recipe("normal", shape=(2,), dtype="float33")


# ------------------------------------------------------------------------------------------- the wire


NORM = get_operator("group_norm_backward")


def _message(recipe: Recipe) -> Any:
    call = NORM.build()
    metas = {**call.inputs, "mean": recipe.meta}
    message, follow = codec.encode_request(metas, {"mean": recipe}, NORM, call.attrs, chunk_from_bytes=1)
    assert not follow
    return message


def test_recipes_travel() -> None:
    for recipe in (
        Recipe("normal", shape=(2, 3), seed=MAX_SEED, mean=0.1, std=3),
        Recipe("uniform", shape=(2, 3), dtype="float16", repeat=6, digest=b"d" * 32),
        Recipe("constant", shape=(2, 3), strides=(0, 0), value=2),
    ):
        wire = codec.decode_request(NORM, _message(recipe), A2)
        assert wire.contents["mean"] == codec.WireContent(recipe.meta.content_bytes, recipe=recipe)
        assert not wire.contents["mean"].follows


def test_parameters_that_were_left_out_have_their_defaults() -> None:
    message = _message(Recipe("uniform", shape=(2, 3), low=0.25))
    del message.mean.recipe.parameters[1:]
    recipe = codec.decode_request(NORM, message, A2).contents["mean"].recipe
    assert recipe is not None
    assert recipe.problem() is None
    assert np.array_equal(recipe.array(), Recipe("uniform", shape=(2, 3), low=0.25, high=1).array())


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            lambda r: setattr(r, "generator", "x"),
            "group_norm_backward: mean: found generator 'x'; expected one of",
        ),
        (lambda r: r.parameters.extend([1.0] * 10**5), "mean: found 9 parameters of normal"),
        (lambda r: setattr(r, "digest", b"x" * 10**5), "mean: found a digest of 33 bytes"),
        (lambda r: setattr(r, "digest", b"x" * 31), "mean: found a digest of 31 bytes"),
        (lambda r: r.ClearField("generator"), "mean: found generator ''"),
    ],
)
def test_bad_recipe_is_told_with_its_operand(edit: Any, problem: str) -> None:
    message = codec.encode_request({**NORM.build().inputs}, {}, NORM, NORM.build().attrs)[0]
    for name, meta in NORM.build().inputs.items():
        if meta is not None:
            codec.encode_recipe(Recipe.of(Draw("normal"), meta, 1), getattr(message, name).recipe)
    codec.check_contents(codec.decode_request(NORM, message, A2), chunked=False)
    edit(message.mean.recipe)
    with pytest.raises(InvalidRecipe, match=problem) as caught:
        codec.check_contents(codec.decode_request(NORM, message, A2), chunked=False)
    assert caught.value.operand == "mean"


# --------------------------------------------------------------------------------- the records' own


def test_records_say_what_to_draw_for_all_operands_but_those_whose_values_are_checked() -> None:
    for record in OPERATORS.values():
        without = {param.name for param in record.inputs if param.draw is None}
        assert without == {*record.checked_operands}, record.name


def test_records_draws_can_be_made_in_every_documented_type(record: OpRecord) -> None:
    for param in record.inputs:
        if param.draw is not None:
            for dtype in {dtype for types in param.dtypes.values() for dtype in types}:
                assert param.draw.problem(dtype) is None, (param.name, dtype)


def test_records_recipes_make_calls_with_finite_results(record: OpRecord) -> None:
    for sample in record.samples(A2):
        call = sample.call
        made = recipes(record, call, seed=11)
        assert len({recipe.seed for recipe in made.values()}) == len(made)
        if record.accepts_unchecked(call) or sum(r.meta.nbytes for r in made.values()) > 2**22:
            continue
        verdict = validate_call(record, call)
        assert not verdict.violations
        rest = record.make_inputs(call, np.random.default_rng(0))
        inputs = {
            n: None if m is None else made[n].array() if n in made else rest[n]
            for n, m in call.inputs.items()
        }
        outputs = {n: np.empty(m.shape, np.float64) for n, m in verdict.outputs.items() if m is not None}
        record.reference(inputs, call.attrs, outputs)
        for output, array in outputs.items():
            meta = verdict.outputs[output]
            assert isinstance(meta, TensorMeta)
            is_finite = np.isfinite(array.astype(meta.dtype.numpy).astype(np.float64))
            assert is_finite.all(), (sample.name, output)
