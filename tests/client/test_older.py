"""Answers that look like those of a server that lacks an operator, and are or are none."""

from __future__ import annotations

import pytest
from tests.client.both import BOTH, Make, call_once
from tests.client.fake_service import STREAMED, abort_with, fake_service

from npugrad.errors import MalformedRequest, NpugradError, UnsupportedOperator
from npugrad_client._attempt import Attempt
from npugrad_client._older import version_question

OPERATOR = "group_norm_backward"
NO_CALL = "execute: header: found no call; expected one of gelu_backward"


def answered(make: Make, error: NpugradError) -> NpugradError:
    """What a caller gets where a server, which says no version, answers with an error."""

    with (
        fake_service(before=lambda context: abort_with(context, error)) as seen,
        pytest.raises(NpugradError) as caught,
    ):
        call_once(make, seen.address, stream_from_bytes=STREAMED)
    return caught.value


@BOTH
@pytest.mark.parametrize(
    "error", [MalformedRequest(NO_CALL), UnsupportedOperator("found an unknown operator")]
)
def test_a_server_may_keep_its_version_to_itself(make: Make, error: NpugradError) -> None:
    found = answered(make, error)
    assert type(found) is UnsupportedOperator
    assert (found.reason, found.operator, found.request_id) == ("OPERATOR_UNSUPPORTED", OPERATOR, "abc123")
    assert "this server, of unknown version, does not have this operator" in str(found)


@BOTH
@pytest.mark.parametrize(
    "error",
    [
        MalformedRequest("execute: found another header; expected a chunk"),
        MalformedRequest(NO_CALL, operator=OPERATOR),
        UnsupportedOperator("group_norm_backward: no device has it", operator=OPERATOR),
    ],
)
def test_other_refusals_stay_what_they_are(make: Make, error: NpugradError) -> None:
    found = answered(make, error)
    assert (type(found), str(found), found.operator) == (type(error), str(error), error.operator)


@pytest.mark.parametrize(
    ("timeout_s", "passed_s", "most_s"), [(None, 9.0, 5.0), (2.0, 1.5, 0.5), (2.0, 9.0, 0.001)]
)
def test_the_version_is_asked_for_in_what_the_deadline_leaves(
    timeout_s: float | None, passed_s: float, most_s: float
) -> None:
    attempt = Attempt(OPERATOR, "here:1", timeout_s)
    attempt.started_s -= passed_s
    question = version_question(attempt)
    assert question.target == attempt.target
    assert question.timeout_s is not None
    assert 0 < question.timeout_s <= most_s
