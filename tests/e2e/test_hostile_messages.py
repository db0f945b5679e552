"""Random damage to good messages: the server answers what the record says of the damaged message.

A server that crashes, hangs, leaks, or answers anything else fails. `make prove-mutations` sends a million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from tests.calls import Sample
from tests.derived import SEEDS
from tests.e2e.harness import Wire, run_victim
from tests.e2e.mutations import BASES, assert_answered, damaged_message, damaged_request
from tests.fix_server import ServerProcess
from tests.summary import Tally
from tests.synthetic.record import REGISTRY as SYNTHETIC_REGISTRY

from npugrad.operator import OpRecord
from npugrad.registry import REGISTRY, Registry

pytestmark = pytest.mark.usefixtures("unharmed")

HYPOTHESIS = settings(
    max_examples=max(150, 2 * settings().max_examples),
    deadline=None,  # no absolute times
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)


@pytest.fixture(scope="module")
def outcomes(tally: Tally) -> Any:
    """Counts reasons; the summary shows them."""
    counted: Counter[str] = Counter()
    yield counted
    for reason, count in counted.items():
        tally(f"hostile: random messages answered with {reason}", count)


@pytest.fixture(
    scope="module", params=[REGISTRY, SYNTHETIC_REGISTRY], ids=["contract", "every-kind-of-attribute"]
)
def registry(request: pytest.FixtureRequest) -> Registry:
    """The contract's operators, and one with every kind of attribute."""
    registry: Registry = request.param
    return registry


@pytest.fixture(scope="module")
def victim(
    registry: Registry, victim: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of these operators."""
    if registry is REGISTRY:
        yield victim
        return
    program = ("-m", "tests.synthetic.server")
    with run_victim(tmp_path_factory.mktemp("victim"), program=program) as running:
        yield running


@pytest.fixture(scope="module")
def normal(registry: Registry) -> Sample:
    """A call of the first of them."""
    return BASES[registry][0]


@pytest.mark.parametrize("damage", [damaged_message, damaged_request], ids=["message", "bytes"])
@HYPOTHESIS
@given(seed=SEEDS)
def test_damaged_requests(
    registry: Registry,
    damage: Callable[[Random, Registry], tuple[OpRecord, Any]],
    wire: Wire,
    outcomes: Counter[str],
    seed: int,
) -> None:
    record, request = damage(Random(seed), registry)
    sent = request if isinstance(request, bytes) else request.SerializeToString()
    reason = assert_answered(wire, record, sent)
    outcomes[reason] += 1
    event(reason)
