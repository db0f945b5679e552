from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npugrad_server.devices import DeviceListError, DeviceName, parse_device, resolve


@pytest.mark.parametrize(
    ("text", "npu_count", "expected"),
    [
        ("auto", None, ("cpu:0",)),
        ("auto", 0, ("cpu:0",)),
        ("auto", 2, ("npu:0", "npu:1")),
        ("cpu:0", None, ("cpu:0",)),
        ("cpu:0, cpu:3", None, ("cpu:0", "cpu:3")),
        ("npu:1", 2, ("npu:1",)),
        (
            "npu:0?deterministic=1,npu:1, npu:2?deterministic=0",
            3,
            ("npu:0?deterministic=1", "npu:1", "npu:2?deterministic=0"),
        ),
        ("test:2?ms=20", None, ("test:0?ms=20", "test:1?ms=20")),
        ("test:1", None, ("test:0",)),
        ("test:1?crash=a,b&ms=1", None, ("test:0?crash=a,b&ms=1",)),
    ],
)
def test_a_list_becomes_devices(text: str, npu_count: int | None, expected: tuple[str, ...]) -> None:
    assert resolve(text, npu_count) == expected


@pytest.mark.parametrize(
    ("text", "npu_count", "message"),
    [
        ("npu:0", None, "found npu:0; expected CPU devices such as 'cpu:0', because no NPU can be used"),
        ("npu:0,npu:2", 2, "found npu:2; expected NPUs of this host, which has 2"),
        ("", None, "found device ''; expected 'auto' or a list"),
        ("cpu", None, "found device 'cpu'"),
        ("cpu:0,", None, "found device ''"),
        ("gpu:0", None, "found device 'gpu:0'"),
        ("cpu:-1", None, "found device 'cpu:-1'"),
        ("cpu:0,cpu:0", None, "found cpu:0 more than once"),
        ("cpu:0,npu:0", 1, "found kinds cpu and npu"),
        ("cpu:0,test:1", None, "found kinds cpu and test"),
        ("test:1,test:2", None, "expected one test:N"),
        ("test:0", None, "found 0 simulated devices; expected 1 to 64"),
        ("test:65", None, "found 65 simulated devices"),
        (
            "cpu:0?ms=1",
            None,
            "found options in 'cpu:0\\?ms=1'; expected coordinates=float32 or coordinates=float64 for a CPU",
        ),
        ("cpu:0?coordinates=double", None, "expected coordinates=float32 or coordinates=float64 for a CPU"),
        ("cpu:0?coordinates=float64,cpu:1", None, "found CPUs with and without coordinates=float64"),
        ("npu:0?coordinates=float64", 1, "expected deterministic=0 or deterministic=1 for an NPU"),
        ("npu:0?ms=1", 1, "expected deterministic=0 or deterministic=1 for an NPU"),
        ("npu:0?deterministic=yes", 1, "expected deterministic=0 or deterministic=1 for an NPU"),
        ("npu:0?deterministic=1,npu:0", 1, "found npu:0 more than once"),
        ("test:1?ms", None, "found option 'ms'"),
        ("test:1?ms=1&ms=2", None, "found option 'ms=2'"),
    ],
)
def test_a_list_that_cannot_be_served_says_why(text: str, npu_count: int | None, message: str) -> None:
    with pytest.raises(DeviceListError, match=message):
        resolve(text, npu_count)


@settings(deadline=None)
@given(
    st.dictionaries(st.text("abcdefg", min_size=1), st.text("xyz0123456789.,:?", max_size=5), max_size=3),
    st.integers(0, 9999),
)
def test_the_text_of_a_device_reads_back(options: dict[str, str], index: int) -> None:
    device = DeviceName("test", index, options)
    assert parse_device(str(device)) == device
    assert device.name == f"test:{index}"


@pytest.mark.parametrize(
    ("text", "mode"), [("npu:0", None), ("npu:0?deterministic=1", True), ("npu:0?deterministic=0", False)]
)
def test_an_npu_may_keep_one_mode(text: str, mode: bool | None) -> None:
    assert parse_device(text).deterministic is mode


@pytest.mark.parametrize(
    ("text", "exact"),
    [("cpu:0", False), ("cpu:0?coordinates=float32", False), ("cpu:0?coordinates=float64", True)],
)
def test_a_cpu_may_take_coordinates_in_float64(text: str, exact: bool) -> None:
    assert parse_device(text).float64_coordinates is exact
    assert resolve(f"{text},{text.replace('0', '1', 1)}") == (text, text.replace("0", "1", 1))
