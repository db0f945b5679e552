"""The public list of the client, and what its generated methods say of themselves."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib.resources import files

import pytest
from tests.client.public_names import shown

import npugrad
import npugrad_client
import npugrad_client.errors
from npugrad import OPERATORS, OpRecord
from npugrad.errors import error_class
from npugrad.operator import TensorParam
from npugrad_client import Client, NpugradError, _generated_ops, _info

RECORDS = pytest.mark.parametrize("record", OPERATORS.values(), ids=list(OPERATORS))


def test_the_public_list_is_what_the_package_shows() -> None:
    assert shown(npugrad_client) == set(npugrad_client.__all__)
    assert npugrad_client.__all__ == sorted(npugrad_client.__all__)
    for name in npugrad_client.errors.__all__:
        assert issubclass(getattr(npugrad_client, name), NpugradError)
    assert files(npugrad_client).joinpath("py.typed").is_file()


def test_every_public_name_and_every_field_of_a_record_is_documented() -> None:
    for name in npugrad_client.__all__:
        value, doc = getattr(npugrad_client, name), inspect.getdoc(getattr(npugrad_client, name)) or ""
        assert doc, name
        if inspect.isclass(value) and value.__module__.startswith("npugrad_client"):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                assert method.startswith("_") or inspect.getdoc(function), f"{name}.{method}"
        if dataclasses.is_dataclass(value) and name != "ServerLimits":
            for found in dataclasses.fields(value):
                assert f"\n    {found.name}: " in doc, f"{name}.{found.name}"


def test_what_methods_give_back_is_public() -> None:
    """A user can name every type that a call returns, as far as it is the client's own."""
    own = {
        name: value
        for module in (_generated_ops, _info)
        for name, value in vars(module).items()
        if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
    }
    reached: set[str] = set()
    todo = [
        inspect.get_annotations(method)["return"]
        for name, method in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_")
    ]
    while todo:
        for name in set(re.findall(r"\w+", todo.pop())) & set(own) - reached:
            reached.add(name)
            todo += [str(f.type) for f in dataclasses.fields(own[name])]
    assert reached == set(own), "a record that no method gives back"
    assert reached <= set(npugrad_client.__all__)


def doc_of(record: OpRecord) -> str:
    doc = inspect.getdoc(getattr(Client, record.name))
    assert doc is not None
    return doc


def section(doc: str, name: str) -> dict[str, str]:
    """Entries of a section of a docstring, each as one line."""
    body = re.split(r"\n(?=\S)", doc.partition(f"\n{name}:\n")[2])[0]
    entries = re.split(r"\n    (?=\S)", "\n" + body)[1:]
    return dict(re.sub(r"\s+", " ", entry).strip().split(": ", 1) for entry in entries)


@RECORDS
def test_a_docstring_tells_each_argument_once(record: OpRecord) -> None:
    arguments = section(doc_of(record), "Args")
    assert list(arguments) == list(inspect.signature(getattr(Client, record.name)).parameters)[1:]
    for param in record.params:
        if param in record.outputs:
            continue
        text = arguments[param.name]
        assert text.startswith(re.sub(r"\s+", " ", param.doc))
        if isinstance(param, TensorParam):
            tells_type = "dtype of" in text or any(str(d) in text for d in npugrad.DType)
            assert tells_type, f"{param.name} has no type"
            assert len(re.findall(r"float32", text)) <= 1
            assert ("None" in text or "null" in text) is param.optional
        else:
            assert all(f'"{name}"' in text for name in param.choices)


@RECORDS
def test_a_docstring_tells_results_and_numbers(record: OpRecord) -> None:
    doc = doc_of(record)
    assert record.summary in re.sub(r"\s+", " ", doc)
    assert record.aclnn_name in doc
    assert list(section(doc, "Returns")) == [*(p.name for p in record.outputs), "info"]
    raised = section(doc, "Raises")
    numbers = set(map(int, re.findall(r"\b\d{6}\b", " ".join(raised.values()))))
    assert numbers == {c.code for c in record.constraints}
    assert set(raised) <= set(npugrad_client.errors.__all__)
    assert {"MalformedTensor", "TransportError", "DeviceError", "WrongType"} <= set(raised)
    unsafe = {error_class(record.unsafe).__name__} if record.checked_operands else set()
    assert {name for name in raised if name.startswith("Unsafe")} == unsafe


@RECORDS
def test_results_have_the_records_outputs(record: OpRecord) -> None:
    cls = getattr(_generated_ops, f"{record.rpc}Result")
    assert [f.name for f in dataclasses.fields(cls)] == [*(p.name for p in record.outputs), "info"]
    masked = any(p.masked_by is not None for p in record.outputs)
    assert ("None for masked-out outputs" in (cls.__doc__ or "")) is masked


def test_results_of_two_calls_can_be_compared_and_kept_in_sets() -> None:
    """By identity: comparing arrays inside would raise."""
    left, right = (npugrad_client.GridSampler2DBackwardResult(None, None, None) for _ in range(2))  # type: ignore[arg-type]
    assert left != right
    assert len({left, right, left}) == 2
