"""Records take what the pages say, release by release: no parameter, type or product too many or too few."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.pages import RELEASES, Facts, ParameterFacts, load

from npugrad import OPERATORS, DType, validate
from npugrad.errors import WrongValue
from npugrad.operator import AttrParam, OpRecord, Param, TensorParam
from npugrad.profiles import PROFILES
from npugrad.releases import CannRelease
from npugrad.validation import validate_call

PAGES = [
    pytest.param(name, release, id=f"{name}-{release}")
    for name, record in OPERATORS.items()
    for release in RELEASES
    if record.aclnn_name in load(release)
]


def at(name: str, release: str) -> tuple[OpRecord, Facts]:
    """The record by the pages of a release, and what its page says."""
    record = OPERATORS[name].at(CannRelease.parse(release))
    return record, load(release)[record.aclnn_name]


def _declared(param: Param) -> tuple[str, str, bool]:
    if isinstance(param, AttrParam):
        return param.c_name, param.type, False
    return param.c_name, "tensor", param.role == "output"


def test_every_release_with_facts_has_a_profile() -> None:
    assert RELEASES == PROFILES


@pytest.mark.parametrize(("name", "release"), PAGES)
def test_parameters_are_those_of_the_page_in_its_order(name: str, release: str) -> None:
    record, facts = at(name, release)
    expected = [(param.c_name, param.type, param.output) for param in facts.params]
    assert [_declared(param) for param in record.params] == expected
    optional = {param.c_name for param in facts.params if param.optional}
    assert optional <= {
        param.c_name for param in record.params if isinstance(param, AttrParam) or param.optional
    }


@pytest.mark.parametrize(("name", "release"), PAGES)
def test_products_and_types_are_those_of_the_page(name: str, release: str) -> None:
    record, facts = at(name, release)
    assert set(record.products) == set(facts.products)
    for param, said in zip(record.params, facts.params, strict=True):
        if isinstance(param, TensorParam):
            found = {product: set(param.dtypes.get(product, ())) for product in facts.products}
            for product, types in said.dtypes.items():
                differing = found[product] ^ {dtype for dtype in types if dtype.has_data}
                assert all(_is_picked(record, dtype) for dtype in differing), (param.name, differing)


def _is_picked(record: OpRecord, dtype: DType) -> bool:
    """Whether a rule on types says why it does not follow the page in this one."""
    name = {"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())
    return any(name in rule.pick for rule in record.constraints if rule.id.endswith(".dtype"))


@pytest.mark.parametrize(("name", "release"), PAGES)
def test_deterministic_calls_are_refused_where_the_page_says_there_are_none(name: str, release: str) -> None:
    record, facts = at(name, release)
    if facts.determinism is not None:
        call = next(iter(record.samples(facts.products[-1]))).call
        is_refused = record.determinism_check(call, CannRelease.parse(release)) is not None
        assert is_refused == (facts.determinism == "no")


@pytest.mark.parametrize(
    ("operator", "dtype", "product", "statuses"),
    [
        ("grid_sampler_2d_backward", "float64", "atlas-a2", (161002, 0, 0, 0, 0, 0)),
        ("grid_sampler_2d_backward", "float64", "atlas-training", (161002, 561103, *(161002,) * 4)),
        ("group_norm_backward", "float32", "atlas-a3", (0, 561103, 0, 0, 0, 0)),
        ("layer_norm_backward", "float32", "atlas-training", (0, 561103, 0, 0, 0, 0)),
        ("layer_norm_backward", "bfloat16", "atlas-training", (161002, 561103, *(161002,) * 4)),
    ],
)
def test_the_pages_of_a_release_decide(
    operator: str, dtype: str, product: str, statuses: tuple[int, ...]
) -> None:
    call = OPERATORS[operator].build(dtype=dtype)
    for release, status in zip((None, *RELEASES), statuses, strict=True):
        verdict = validate(operator, inputs=call.inputs, attrs=call.attrs, product=product, cann=release)
        assert verdict.status == status, release


def test_a_release_without_public_pages_has_the_nearest_profile_and_one_that_is_none_is_refused() -> None:
    call = OPERATORS["group_norm_backward"].build()
    for release, nearest in (("8.3.RC1", "8.5.0"), ("10.0.0", "9.2.0-beta.2")):
        with pytest.warns(UserWarning, match=f"CANN {release}: the pages of .* by those of {nearest}"):
            validate("group_norm_backward", inputs=call.inputs, attrs=call.attrs, cann=release)
    with pytest.raises(WrongValue, match="cann: found 'new'; expected a release of CANN"):
        validate("group_norm_backward", inputs=call.inputs, attrs=call.attrs, cann="new")


@pytest.mark.parametrize("name", OPERATORS)
def test_a_rule_of_another_release_is_broken_alone(name: str) -> None:
    """Rules of the records' own pages are broken by tests/contract/test_constraints.py."""
    own = {(rule.id, rule.products) for rule in OPERATORS[name].constraints}
    for record in (OPERATORS[name].at(CannRelease.parse(release)) for release in RELEASES):
        for rule in record.constraints:
            if (rule.id, rule.products) not in own:
                calls = [sample.call for product in record.products for sample in record.samples(product)]
                broken = [found for found in map(rule.violate, calls) if found is not None]
                assert broken, rule.id
                assert all([v.id for v in validate_call(record, b).violations] == [rule.id] for b in broken)


def differing(old: Facts, new: Facts) -> set[str]:
    """What differs between two pages: attributes of their facts, but for where they stand."""
    of_page = {"products", "prototype", "codes", "constraints", "determinism"}
    found = {each for each in of_page if getattr(old, each) != getattr(new, each)}
    for before, after in zip(old.params, new.params, strict=False):
        of_param = ParameterFacts.__dataclass_fields__
        found |= {each for each in of_param if getattr(before, each) != getattr(after, each)}
    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_what_differs_between_releases_is_in_the_record(name: str) -> None:
    """The tests above see products, types and determinism; of the rest, the record must say what it does."""
    for pair in pairwise(RELEASES):
        if all(OPERATORS[name].aclnn_name in load(release) for release in pair):
            (old, old_facts), (new, new_facts) = (at(name, release) for release in pair)
            told = {each for each in {*old.notes, *new.notes} if old.notes.get(each) != new.notes.get(each)}
            compared = {"products", "dtypes", "determinism"}
            assert differing(old_facts, new_facts) - compared == told, pair
