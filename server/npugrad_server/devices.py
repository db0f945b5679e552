"""Device names, and the list of devices that a server is started with.

`auto` takes every NPU, or one CPU device if there are none. Otherwise give a list such as ``cpu:0,cpu:1`` or
``npu:0,npu:1``. ``npu:0?deterministic=1`` makes an NPU run every call deterministically, ``deterministic=0``
none; without either, each call chooses if CANN can switch (from 9.0), and none is deterministic if it cannot.
``cpu:0?coordinates=float64`` makes a CPU compute sampling coordinates in float64; the default, ``float32``,
is what PyTorch's and mmcv's kernels do; all devices of a list must agree on it. For capacity and scaling
tests there is also ``test:N?OPTIONS``: N simulated devices, with the options described in
`npugrad_server.backends.test`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from npugrad_server.npus import and_visibility

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO = "auto"
KINDS = ("npu", "cpu", "test")
MAX_DEVICES = 64
DETERMINISTIC = "deterministic"
"""The option of an NPU."""
COORDINATES = "coordinates"
"""The option of a CPU."""
_FLAGS = {"0": False, "1": True}
_OPTIONS = {
    "npu": ("an NPU", DETERMINISTIC, tuple(_FLAGS)),
    "cpu": ("a CPU", COORDINATES, ("float32", "float64")),
}
"""By kind: what it is called, its one option, and the option's values."""
_ONE = re.compile(r"(?P<kind>[a-z]+):(?P<index>\d{1,4})(\?(?P<options>.*))?", re.ASCII)
_EXPECTED = "expected 'auto' or a list such as 'cpu:0', 'cpu:0,cpu:1' or 'npu:0,npu:1'"


class DeviceListError(ValueError):
    """A list of devices that cannot be served; the message says why and what is allowed."""


@dataclass(frozen=True)
class DeviceName:
    """One device.

    Attributes:
        kind: ``"npu"``, ``"cpu"`` or ``"test"``.
        index: Number among its kind.
        options: Options by name; NPUs and CPUs have one each.
    """

    kind: str
    index: int
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def name(self) -> str:
        """Name without options, as shown: ``"cpu:0"``."""
        return f"{self.kind}:{self.index}"

    @property
    def deterministic(self) -> bool | None:
        """Whether every call runs deterministically; None if each call chooses."""
        return _FLAGS.get(self.options.get(DETERMINISTIC, ""))

    @property
    def float64_coordinates(self) -> bool:
        """Whether it computes sampling coordinates in float64."""
        return self.options.get(COORDINATES) == "float64"

    @property
    def owns_memory(self) -> bool:
        """Whether it has its own memory instead of using the host's."""
        return self.kind == "npu" or "memory" in self.options

    def __str__(self) -> str:
        """Name with options; `parse_device` reads it."""
        options = "&".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}?{options}" if options else self.name


def parse_device(text: str) -> DeviceName:
    """Reads one concrete device such as ``"cpu:0"``, ``"npu:0?deterministic=1"`` or ``"test:0?ms=20"``.

    Raises:
        DeviceListError: It is not one.
    """
    match = _ONE.fullmatch(text.strip())
    if match is None or match["kind"] not in KINDS:
        raise DeviceListError(f"found device {text!r}; {_EXPECTED}")
    options = _parse_options(text, match["options"] or "")
    if options and match["kind"] in _OPTIONS:
        _check_options(text, match["kind"], options)
    return DeviceName(match["kind"], int(match["index"]), MappingProxyType(options))


def _parse_options(text: str, given: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for option in filter(None, given.split("&")):
        key, equals, value = option.partition("=")
        if not equals or not key or key in options:
            raise DeviceListError(f"found option {option!r} in {text!r}; expected name=value, each name once")
        options[key] = value
    return options


def _check_options(text: str, kind: str, options: Mapping[str, str]) -> None:
    called, name, values = _OPTIONS[kind]
    if set(options) != {name} or options[name] not in values:
        allowed = " or ".join(f"{name}={value}" for value in values)
        raise DeviceListError(f"found options in {text!r}; expected {allowed} for {called}")


def may_need_npus(text: str) -> bool:
    """Whether resolving a list requires knowing the NPUs of this host."""
    return text.strip() == AUTO or any(part.strip().startswith("npu:") for part in text.split(","))


def resolve(text: str, npu_count: int | None = None) -> tuple[str, ...]:
    """Turns the list a server is started with into concrete devices.

    Args:
        text: ``"auto"``, a list, or ``"test:N?OPTIONS"`` for N simulated devices.
        npu_count: Number of usable NPUs of this host; None if none can be used.

    Returns:
        Names with options, in the order given, for `PoolSettings.devices`.

    Raises:
        DeviceListError: The list is malformed or empty, repeats a device, mixes kinds, or has NPUs that this
            host lacks.
    """
    if text.strip() == AUTO:
        return tuple(f"npu:{i}" for i in range(npu_count or 0)) or ("cpu:0",)
    # Labels among the options of simulated devices may have commas.
    parts = [text] if text.strip().startswith("test:") and "?" in text else text.split(",")
    found = [parse_device(part) for part in parts]
    _check(text, found, npu_count)
    if found[0].kind == "test":
        found = _simulated(found[0])
    return tuple(str(device) for device in found)


def _simulated(count: DeviceName) -> list[DeviceName]:
    """N simulated devices: N stands where other kinds have the index."""
    if count.index not in range(1, MAX_DEVICES + 1):
        raise DeviceListError(f"found {count.index} simulated devices; expected 1 to {MAX_DEVICES}")
    return [DeviceName("test", index, count.options) for index in range(count.index)]


def _check(text: str, found: list[DeviceName], npu_count: int | None) -> None:
    names = [device.name for device in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DeviceListError(f"found {', '.join(twice)} more than once in {text!r}; expected each once")
    kinds = sorted({device.kind for device in found})
    if len(kinds) > 1:
        raise DeviceListError(
            f"found kinds {' and '.join(kinds)} in {text!r}; expected one kind: a result must not depend on "
            "which device was free"
        )
    if len({device.float64_coordinates for device in found}) > 1:
        raise DeviceListError(
            f"found CPUs with and without {COORDINATES}=float64 in {text!r}; expected all alike: a result "
            "must not depend on which device was free"
        )
    if kinds == ["test"] and len(found) > 1:
        raise DeviceListError(f"found {text!r}; expected one test:N for N simulated devices")
    if kinds == ["npu"]:
        _check_npus(found, npu_count)


def _check_npus(devices: list[DeviceName], npu_count: int | None) -> None:
    if npu_count is None:
        raise DeviceListError(
            f"found {devices[0].name}; expected CPU devices such as 'cpu:0', because no NPU can be used here"
        )
    absent = [device.name for device in devices if device.index >= npu_count]
    if absent:
        found = f"found {', '.join(absent)}; expected NPUs of this host, which has {npu_count}"
        raise DeviceListError(and_visibility(found))
