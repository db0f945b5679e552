"""Wrong usage: one sentence, in the caller's terms and of one family, before anything is sent."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.client.both import BOTH, Make
from tests.client.fake_service import group_norm

import npugrad
from npugrad import OPERATORS, Scalar, TensorMeta
from npugrad.usage import reports_usage
from npugrad_client import (
    AsyncClient,
    Client,
    ClientUnusable,
    NpugradError,
    Recipe,
    RetryPolicy,
    Tls,
    UsageError,
    WrongType,
    WrongValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fix_server import ServerProcess

HERE = "localhost:50051"

CONSTRUCTORS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (Client, (), {}, "Client: found nothing for target; expected a value"),
    (Client, (HERE,), {"timeout": 30}, "Client: unknown argument 'timeout'; did you mean 'timeout_s'?"),
    (
        AsyncClient,
        (HERE,),
        {"timeout": 30},
        "AsyncClient: unknown argument 'timeout'; did you mean 'timeout_s'?",
    ),
    (AsyncClient, (HERE,), {"threads": 4}, "AsyncClient: unknown argument 'threads'; known are target, "),
    (
        Client,
        (HERE, 30),
        {},
        "Client: found 2 arguments without a name; expected at most 1, and names for the others, such as ",
    ),
    (Client, (HERE,), {"target": HERE}, "Client: target: found two values; expected one"),
    (Client, (HERE,), {"timeout_s": "30"}, "timeout_s: found '30' (str); expected seconds above 0, or None"),
    (AsyncClient, (HERE,), {"timeout_s": -1}, "timeout_s: found -1; expected seconds above 0, or None"),
    (Client, (HERE,), {"threads": "4"}, "threads: found '4' (str); expected 1 or more"),
    (Client, (HERE,), {"threads": 0}, "threads: found 0; expected 1 or more"),
    (
        Client,
        (HERE,),
        {"stream_from_bytes": 1.5},
        "stream_from_bytes: found 1.5 (float); expected 0 bytes or",
    ),
    (Client, ("host:abc",), {}, "target: found port 'abc' in 'host:abc'; expected 1 to 65535"),
    (Client, (50051,), {}, "target: found int; expected text such as 'localhost:50051'"),
    (Client, (HERE,), {"retry": 3}, "retry: found int; expected RetryPolicy or None"),
    (Client, (HERE,), {"tls": "ca.pem"}, "tls: found str; expected Tls, True or None"),
    (RetryPolicy, (), {"tries": 3}, "RetryPolicy: unknown argument 'tries'; did you mean 'max_tries'?"),
    (Tls, (), {"cert": "c.pem"}, "Tls: unknown argument 'cert'; did you mean 'certificate'?"),
    (Tls, (), {"ca": 5}, "Tls: ca: found int; expected a path, or PEM as bytes"),
    (Tls, (), {"server_name": b"a"}, "Tls: server_name: found bytes; expected text or None"),
    (Tls, (), {"key": "k.pem"}, "tls: a key needs a certificate"),
    (Recipe, ("uniform",), {}, "Recipe: found nothing for shape; expected a value"),
    (TensorMeta, ("float32", 3), {}, "TensorMeta: shape: found 3; expected integers"),
    (TensorMeta, ("float33", (2,)), {}, "unknown dtype 'float33'; known are float32, "),
    (Scalar, ("float33", 2), {}, "unknown dtype 'float33'; known are float32, "),
    (
        npugrad.validate,
        ("group_norm",),
        {"inputs": {}, "attr": {}},
        "validate: unknown argument 'attr'; did you",
    ),
]


@pytest.mark.parametrize(("make", "given", "named", "told"), CONSTRUCTORS)
def test_constructors_say_what_is_wrong(
    make: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        make(*given, **named)
    assert str(caught.value).startswith(told)
    assert isinstance(caught.value, WrongType if isinstance(caught.value, TypeError) else WrongValue)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"group": ..., "groups": 3}, "unknown argument 'groups'; did you mean 'group'?"),
    ({"timeout": 5}, "unknown argument 'timeout'; did you mean 'timeout_s'?"),
    (
        {"beta": 5},
        "unknown argument 'beta'; known are grad_out, input, mean, rstd, gamma, n, c, hxw, group, ",
    ),
    ({"hxw": ..., "c": ...}, "found nothing for c, hxw; expected a value for each"),
    ({"n": ..., "beta": 1}, "; also found nothing for n; expected a value"),
    ({"n": None}, "n: found None; expected an integer in int64"),
    ({"timeout_s": "5"}, "timeout_s: found str; expected seconds or None"),
    ({"input": [[1.0]]}, "input: found list; expected a NumPy array, a torch CPU tensor or anything with"),
    ({"out": {"grad_inputs": None}}, "unknown output 'grad_inputs'; did you mean 'grad_input'?"),
]


@BOTH
@pytest.mark.parametrize(("changes", "told"), CALLS)
def test_calls_say_what_is_wrong_however_they_are_made(
    make: Make, changes: dict[str, Any], told: str
) -> None:
    call = {name: value for name, value in {**group_norm(), **changes}.items() if value is not ...}
    with make(HERE, retry=None) as client:
        ways: tuple[Callable[[], Any], ...] = (
            lambda: client.group_norm_backward(**call),
            lambda: client.submit.group_norm_backward(**call).result(),
            lambda: client.run_many(client.group_norm_backward, [call]),
        )
        for way in ways:
            with pytest.raises(WrongType) as caught:
                way()
            assert str(caught.value).startswith("group_norm_backward: ")
            assert told in str(caught.value)
            assert "Operators" not in str(caught.value)


@BOTH
def test_what_is_no_batch_or_no_question_is_refused(make: Make) -> None:
    with make(HERE, retry=None) as client:
        method, call = client.group_norm_backward, group_norm()
        meta = TensorMeta("float32", (2, 6, 4))
        mistakes: tuple[tuple[Callable[[], Any], str], ...] = (
            (
                lambda: client.run_many(method, call),
                "calls: found dict; expected the keyword arguments of several",
            ),
            (
                lambda: client.run_many(method, [5]),
                "calls: found int; expected the keyword arguments of a call",
            ),
            (
                lambda: client.run_many(method, [], concurrency="4"),
                "concurrency: found '4' (str); expected 1 or",
            ),
            (
                lambda: client.group_norm_backward(meta),
                "group_norm_backward: found 1 argument without a name; ",
            ),
            (lambda: client.server_info(timeout=5), "server_info: unknown argument 'timeout'; did you mean"),
            (
                lambda: client.validate("group_norm_backward", inputs={"inputs": meta}, attrs={}),
                "group_norm_backward: unknown input 'inputs'; did you mean 'input'?",
            ),
            (
                lambda: client.validate("gelu", inputs={}),
                "validate: found nothing for attrs; expected a value",
            ),
        )
        for way, told in mistakes:
            with pytest.raises(WrongType) as caught:
                way()
            assert str(caught.value).startswith(told)
        with pytest.raises(NpugradError, match=r"'group_norm'; did you mean 'group_norm_backward'\?$"):
            client.validate("group_norm", inputs={}, attrs={})


@BOTH
def test_a_closed_client_is_wrong_usage(make: Make) -> None:
    with make(HERE) as client:
        client.close()
        with pytest.raises(ClientUnusable, match="the client for localhost:50051 is closed; make a new one"):
            client.server_info()


def test_methods_stay_real_ones() -> None:
    for name in OPERATORS:
        blocking, waiting = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(blocking) == inspect.signature(waiting)
        assert "kwargs" not in inspect.signature(blocking).parameters
        assert inspect.iscoroutinefunction(waiting)
        assert blocking.__qualname__ == f"Operators.{name}"


def test_the_functions_own_errors_pass() -> None:
    @reports_usage
    def own(number: int) -> None:
        raise TypeError(f"of its own: {number}")

    with pytest.raises(TypeError, match=r"^of its own: 5$") as caught:
        own(5)
    assert type(caught.value) is TypeError


# ------------------------------------------------------------------------------------------- gradients


@pytest.fixture
def wanting_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A call with an operand that requires gradients, which nothing has been said of."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("npugrad_client._warnings._NOTED", set())
    call = {n: torch.tensor(v) if isinstance(v, np.ndarray) else v for n, v in group_norm().items()}
    call["input"].requires_grad_()
    return call


@pytest.mark.torch
@BOTH
def test_operands_that_require_gradients_are_told_of_once(
    server: ServerProcess, make: Make, wanting_gradients: dict[str, Any]
) -> None:
    with make(server.address, timeout_s=60) as client:
        told = "^group_norm_backward: found requires_grad=True for input, .*npugrad_client.torch.remote"
        with pytest.warns(UserWarning, match=told):
            client.group_norm_backward(**wanting_gradients)
        client.group_norm_backward(**wanting_gradients)


@pytest.mark.torch
def test_nothing_is_said_of_gradients_where_autograd_is_off(
    server: ServerProcess, wanting_gradients: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    with Client(server.address, timeout_s=60) as client, torch.no_grad():
        client.group_norm_backward(**wanting_gradients)
        client.submit.group_norm_backward(**wanting_gradients).result()
        client.run_many(client.group_norm_backward, [wanting_gradients])


# ------------------------------------------------------------------------------------------- PyTorch


@pytest.mark.torch
def test_the_functions_for_pytorch_say_what_is_wrong() -> None:
    torch = pytest.importorskip("torch")
    functions: Any = importlib.import_module("npugrad_client.torch")
    attend, one = functions.fused_floyd_attention, torch.ones(1)
    with Client(HERE, retry=None) as client:
        mistakes: tuple[tuple[Callable[[], Any], str], ...] = (
            (lambda: functions.remote(HERE), "remote: client: found str; expected a Client"),
            (
                lambda: functions.remote(client, timeout=5),
                "remote: unknown argument 'timeout'; did you mean 't",
            ),
            (lambda: functions.remote(client, timeout_s="5"), "timeout_s: found '5' (str); expected seconds"),
            (lambda: functions.remote(client, priority=101), "priority: found 101; expected -100 to 100"),
            (
                lambda: functions.drop_in(client, policy="faster"),
                "drop_in: unknown argument 'policy'; known ",
            ),
            (lambda: functions.Policies(on_refuse="warn"), "Policies: unknown argument 'on_refuse'; did you"),
            (
                lambda: functions.Policies(min_bytes="1"),
                "Policies: min_bytes: found '1' (str); expected 0 or",
            ),
            (
                lambda: attend(one, client=client),
                "fused_floyd_attention: found nothing for key1, value1, key2,",
            ),
            (
                lambda: attend(*[one] * 5, client=client, policies="local"),
                "policies: found str; expected Pol",
            ),
        )
        for way, told in mistakes:
            with pytest.raises(UsageError) as caught:
                way()
            assert str(caught.value).startswith(told)
