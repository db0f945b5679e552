"""Requests of one signature share a plan; what is refused, is refused every time and not kept."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.calls import sample
from tests.synthetic.record import REGISTRY as SYNTHETIC

from npugrad import codec
from npugrad.call import CallOptions
from npugrad.errors import (
    InvalidOperand,
    InvalidRecipe,
    MalformedRequest,
    MalformedTensor,
    NpugradError,
    RequestError,
)
from npugrad.generators import Draw
from npugrad.operator import OpRecord
from npugrad.ops import get_operator
from npugrad.products import Product
from npugrad.recipe import Recipe
from npugrad.registry import REGISTRY, Registry
from npugrad_server import plans
from npugrad_server.plans import Planner, Request

A2 = Product.ATLAS_A2
NORM = get_operator("group_norm_backward")
DIGEST = b"d" * 32


def planner(registry: Registry = REGISTRY) -> Planner:
    return Planner(A2, registry)


def plan(made: Planner, message: Any, record: OpRecord = NORM, **more: Any) -> Request:
    """Plans as the servicer does."""
    data = message.SerializeToString()
    return of_bytes(made, data, type(message), record, **more)


def of_bytes(made: Planner, data: bytes, message: Any, record: OpRecord = NORM, **more: Any) -> Request:
    given = {"request_id": "r", "timeout_s": None, "chunked": False, **more}
    return made.plan(record, data, lambda: message.FromString(data), **given)


def contents_of(request: Request) -> dict[str, bytes]:
    return {name: bytes(content) for name, content in request.inline.items()}


def of_recipes(seed: int = 7, digest: bytes = b"") -> Any:
    call = NORM.build()
    metas = {name: meta for name, meta in call.inputs.items() if meta is not None}
    made = {n: Recipe.of(Draw("uniform", (0.5, 2.0), 3), m, seed, digest) for n, m in metas.items()}
    return codec.encode_request(call.inputs, made, NORM, call.attrs)[0]


def assert_alike(found: Request, expected: Request) -> None:
    """Whether a plan was known must not show in anything."""
    assert (found.plan.record, found.plan.call) == (expected.plan.record, expected.plan.call)
    assert (found.plan.outputs, found.plan.unused) == (expected.plan.outputs, expected.plan.unused)
    assert (found.options, found.request_id) == (expected.options, expected.request_id)
    assert found.deadline_s == expected.deadline_s
    assert contents_of(found) == contents_of(expected)
    assert found.recipes == expected.recipes
    assert found.known.announced == expected.known.announced
    assert found.known.content_bytes == expected.known.content_bytes
    assert found.known.reply_bytes == expected.known.reply_bytes


def test_calls_of_one_signature_share_a_plan_and_nothing_else() -> None:
    made, first, second = planner(), sample(seed=1), sample(seed=2)
    one = plan(made, first.message(label="a", priority=3), request_id="r1")
    two = plan(made, second.message(label="b"), request_id="r2", timeout_s=60.0)
    assert one.plan is two.plan
    assert one.plan.is_kept
    assert made.plans == 1
    assert one.options == CallOptions(label="a", priority=3)
    assert two.options == CallOptions(label="b")
    assert (one.request_id, two.request_id) == ("r1", "r2")
    assert one.deadline_s is None
    assert two.deadline_s is not None
    assert contents_of(two) == {name: bytes(content) for name, content in second.contents.items()}
    assert contents_of(one) != contents_of(two)
    assert plan(made, first.message(), chunked=True).plan is not one.plan, "in chunks it is another"
    assert made.plans == 2


@pytest.mark.parametrize("registry", [REGISTRY, SYNTHETIC], ids=["contract", "synthetic"])
def test_a_known_call_of_any_operator_is_what_it_was_when_it_was_new(registry: Registry) -> None:
    options = CallOptions(deterministic=True, priority=-100, label="somebody", verify=True)
    for record in registry.records.values():
        for each in record.samples(A2):
            metas = {name: meta for name, meta in each.call.inputs.items() if meta is not None}
            contents = {name: memoryview(b"\1" * meta.content_bytes) for name, meta in metas.items()}
            message, _ = codec.encode_request(
                each.call.inputs,
                contents,
                record,
                each.call.attrs,
                each.call.outputs,
                options,
                registry=registry,
            )
            made = planner(registry)
            new = plan(made, message, record)
            assert_alike(plan(made, message, record), new)
            assert new.plan.is_kept == bool(made.plans)


def test_announced_contents_are_known_with_their_lengths() -> None:
    made, each = planner(), sample()
    frame, follow = each.header()
    message = getattr(frame.header, NORM.name)
    new, again = plan(made, message, chunked=True), plan(made, message, chunked=True)
    assert_alike(again, new)
    assert new.plan is again.plan
    names = {NORM.param_index(name): name for name in each.contents}
    assert again.known.announced == {names[index]: len(content) for index, content in follow}
    for _ in range(2):
        with pytest.raises(MalformedTensor, match="found content announced in chunks"):
            plan(made, message)


def test_seed_and_digest_of_a_known_recipe_are_those_of_its_request() -> None:
    made = planner()
    first, second = plan(made, of_recipes()), plan(made, of_recipes(2**64 - 1, DIGEST))
    assert first.plan is second.plan
    assert {recipe.seed for recipe in first.recipes.values()} == {7}
    assert {(recipe.seed, recipe.digest) for recipe in second.recipes.values()} == {(2**64 - 1, DIGEST)}
    assert_alike(second, plan(planner(), of_recipes(2**64 - 1, DIGEST)))


def options(**values: Any) -> Callable[[Any], None]:
    return lambda message: message.options.MergeFrom(type(message.options)(**values))


def _short(message: Any) -> None:
    message.mean.data = message.mean.data[1:]


def _announced(message: Any) -> None:
    message.mean.chunked_bytes = len(message.mean.data)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (options(label="x" * 65), MalformedRequest, "label: found 65 characters"),
        (options(label="a\nb"), MalformedRequest, "label: found 3 characters"),
        (options(priority=101), MalformedRequest, "priority: found 101"),
        (options(priority=-101), MalformedRequest, "priority: found -101"),
        (lambda message: setattr(message, "group", 0), InvalidOperand, "group"),
        (lambda message: message.ClearField("n"), MalformedRequest, "n: found nothing"),
        (_short, MalformedTensor, "mean: found 31 bytes of content|mean: found"),
        (lambda message: message.mean.ClearField("data"), MalformedTensor, "mean: found no content"),
        (
            lambda message: setattr(message.mean.region, "byte_size", 8),
            RequestError,
            "mean: found content of kind region",
        ),
        (
            lambda message: setattr(message.mean.meta, "data_type", 99),
            MalformedTensor,
            "mean: found data type 99",
        ),
        (_announced, MalformedTensor, "mean: found content announced"),
    ],
)
def test_what_is_refused_is_refused_every_time_and_not_kept(
    spoil: Callable[[Any], None], error: type[NpugradError], words: str
) -> None:
    made, message = planner(), sample().message()
    plan(made, message)
    spoil(message)
    texts = set()
    for each in (made, made, planner()):
        with pytest.raises(error, match=words) as caught:
            plan(each, message)
        texts.add(str(caught.value))
    assert len(texts) == 1
    assert made.plans == 1


def test_a_bad_digest_of_a_known_recipe_is_refused_as_that_of_a_new_one() -> None:
    knowing = planner()
    plan(knowing, of_recipes())
    texts = set()
    for made in (knowing, planner()):
        with pytest.raises(InvalidRecipe) as caught:
            plan(made, of_recipes(digest=b"short"))
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_long_labels_leave_nothing_behind() -> None:
    made, message = planner(), sample().message()
    plan(made, message)
    tracemalloc.start()
    try:
        for number in range(20):
            message.options.label = f"{number}" * 2**18
            with pytest.raises(MalformedRequest, match="label"):
                plan(made, message)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * 2**20


@pytest.mark.parametrize("extra", [b"\x88\x3f\x05", b"\x38\x02", b"\xb8\x00\x02"])
def test_requests_that_are_not_plain_have_plans_of_their_own(extra: bytes) -> None:
    """An unknown field, an attribute that comes twice, and a tag in more bytes than it needs."""
    made, message = planner(), sample(n=2).message()
    data = message.SerializeToString() + extra
    first, second = (of_bytes(made, data, type(message)) for _ in range(2))
    assert first.plan is not second.plan
    assert not first.plan.is_kept
    assert made.plans == 0
    assert_alike(first, plan(made, message))
    # What may begin anywhere is never recognised.
    request = made.plan(NORM, None, lambda: message, request_id="", timeout_s=None, chunked=True)
    assert (request.plan.is_kept, made.plans) == (False, 1)


def test_a_plan_does_not_outlive_its_product_or_its_record() -> None:
    made, message = planner(), sample().message()
    first = plan(made, message)
    made.product = Product.ATLAS_A3
    other = plan(made, message)
    assert other.plan.call.product is Product.ATLAS_A3
    assert other.plan is not first.plan
    record = copy(NORM)
    again = plan(made, message, record)
    assert again.plan.record is record
    assert made.plans == 1


def test_a_message_that_does_not_parse_is_asked_for_and_its_error_passed_on() -> None:
    def read() -> Any:
        raise MalformedRequest("no message")

    for data in (b"\xff\xff", b"", None):
        with pytest.raises(MalformedRequest, match="no message"):
            planner().plan(NORM, data, read, request_id="", timeout_s=None, chunked=False)


def test_a_caller_of_many_signatures_leaves_the_plans_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CACHE_BYTES", 2**20)
    made = planner()
    mine = plan(made, sample().message(label="me"))
    for number in range(1, 100):
        plan(made, sample(hxw=number).message(label="somebody"))
    assert 2 < made.plans < 40
    assert plan(made, sample().message()).plan is mine.plan


@given(st.binary(max_size=40), st.integers(0, 2000))
def test_bytes_that_were_tampered_with_are_taken_as_a_planner_that_knows_nothing_takes_them(
    patch: bytes, at: int
) -> None:
    message = sample().message(label="x")
    data = bytearray(message.SerializeToString())
    data[at : at + len(patch)] = patch
    found, expected = (_outcome(made, bytes(data), type(message)) for made in (KNOWING, planner()))
    assert found == expected


def _outcome(made: Planner, data: bytes, message: Any) -> Any:
    try:
        request = of_bytes(made, data, message)
    except Exception as error:
        return type(error), str(error)
    plan, sent = request.plan, request.known.content_bytes
    return plan.call, plan.outputs, plan.unused, request.options, contents_of(request), sent


KNOWING = planner()
plan(KNOWING, sample().message())
