"""Which release of CANN is found: from each function that tells it, and from what installers write down."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ctypes import c_char_p
from pathlib import Path
from typing import Any

import pytest
from tests.cann_sim.build import Installation

from npugrad.ops import get_operator
from npugrad.releases import CannRelease
from npugrad_server.acl.libraries import Functions, Missing
from npugrad_server.acl.release import COMPATIBLE, installed_release, pairing, predating
from npugrad_server.acl.runtime import Runtime
from npugrad_server.acl.symbols import Symbol

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "npus.md"
FUNCTIONS = ("aclsysGetVersionStr", "aclsysGetCANNVersion")


def runtime(**told: str) -> Runtime:
    """A runtime whose functions tell this; those not named are missing, an empty text is an error."""

    def telling(text: str) -> Callable[..., int]:
        def tell(_: object, into: Any) -> int:
            into.value = text.encode()
            return 0 if text else 100003

        return tell

    missing = {name: Missing(Symbol(name, c_char_p, ()), ()) for name in FUNCTIONS}
    return Runtime(Functions({**missing, **{name: telling(text) for name, text in told.items()}}))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Give a function that fills the folder that ASCEND_HOME_PATH names; there is no other."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)

    def fill(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return fill


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"aclsysGetVersionStr": "9.1.0", "aclsysGetCANNVersion": "8.5.0"}, "9.1.0"),
        ({"aclsysGetCANNVersion": "8.1.RC1"}, "8.1.RC1"),
        ({"aclsysGetVersionStr": "", "aclsysGetCANNVersion": "9.2.0.beta1"}, "9.2.0-beta.1"),
        # A test build tells the number of a component, which is no release.
        ({"aclsysGetVersionStr": "8.5.T8.0.B060", "aclsysGetCANNVersion": ""}, "8.3.RC1"),
        ({}, "8.3.RC1"),
    ],
)
def test_the_newest_function_that_tells_a_release_is_believed(
    write: Callable[[Mapping[str, str]], None], told: Mapping[str, str], expected: str
) -> None:
    write({"version.info": "Version=8.3.0.1.200\nversion_dir=8.3.RC1\n"})
    assert installed_release(runtime(**told)) == CannRelease.parse(expected)


TOOLKIT = "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\ninnerversion=V100R001C23B035\narch=aarch64\n"
CONFIGURED = "# version: 1.0\nruntime_running_version=[7.5.0.1.129:8.0.RC3]\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"aarch64-linux/ascend_toolkit_install.info": TOOLKIT}, "8.3.RC1"),
        ({"ascend_toolkit_install.info": TOOLKIT, "version.cfg": CONFIGURED}, "8.3.RC1"),
        ({"version.cfg": CONFIGURED}, "8.0.RC3"),
        ({"version.cfg": CONFIGURED + "toolkit_running_version=[7.6.T13.0.B094:8.0.T63]\n"}, "8.0.T63"),
        ({"opp/version.info": "Version=7.6.0.1.220\nversion_dir=8.0.0\nops_version=7.6.0.1.220\n"}, "8.0.0"),
        ({"compiler/version.info": "Version=9.2.0-beta.2\nversion_dir=cann\n"}, "9.2.0-beta.2"),
        ({"share/info/runtime/version.info": "Version=8.5.0\nversion_dir=cann\n"}, "8.5.0"),
        ({"runtime/version.info": "Version=8.5.T8.0.B060\nversion_dir=8.5.0.alpha002\n"}, "8.5.0.alpha002"),
    ],
)
def test_what_installers_write_down_is_read(
    write: Callable[[Mapping[str, str]], None], files: Mapping[str, str], expected: str
) -> None:
    write(files)
    assert installed_release(runtime()) == CannRelease.parse(expected)


@pytest.mark.parametrize(
    ("torch_npu", "cann", "span"),
    [
        ("2.13.0", "8.5.0", ""),
        ("2.13.0", "9.2.0-beta.1", ""),
        ("2.13.0", "8.3.RC1", "8.5 to 9.2"),
        ("2.13.0+gitc798c65", "9.3.0", "8.5 to 9.2"),
        ("2.7.1.post8", "8.5.0.alpha002", ""),
        ("2.7.1.post8", "9.2.0", "8.5 to 9.1"),
        ("2.7.1", "9.1.0", "8.0 to 8.3"),
        ("2.7.1", "8.0.RC3", ""),
        ("2.99.0", "7.0.0", ""),
        ("", "9.1.0", ""),
    ],
)
def test_a_torch_npu_for_other_releases_is_told(torch_npu: str, cann: str, span: str) -> None:
    found = f"found torch_npu {torch_npu} with CANN {cann}"
    expected = f"{found}; expected CANN {span}, as the vendor declares for it" if span else ""
    assert pairing(torch_npu, CannRelease.parse(cann)) == expected
    assert pairing(torch_npu, None) == ""


def test_the_guide_has_the_same_pairs() -> None:
    rows = re.findall(r"^\| [89]\.\S+ \| (2\.[^|]*) \| ([^|]*) \|", GUIDE.read_text(), re.MULTILINE)
    listed = {name: tuple(span.split(" to ")) for names, span in rows for name in names.split(", ")}
    assert listed == COMPATIBLE


@pytest.mark.parametrize(
    ("cann", "is_older"),
    [("8.3.RC1", True), ("8.5.0.alpha001", False), ("8.5.0", False), ("9.2.0", False)],
)
def test_an_operator_comes_with_the_previews_of_its_release(cann: str, is_older: bool) -> None:
    record = get_operator("layer_norm_backward")
    found = f"found CANN {cann}; expected CANN 8.5 or newer"
    assert predating(CannRelease.parse(cann), record) == (found if is_older else "")
    assert predating(None, record) == ""


def test_nothing_is_made_up(write: Callable[[Mapping[str, str]], None], tmp_path: Path) -> None:
    assert installed_release(runtime()) is None
    write({"version.info": "Version\nversion_dir=latest\n\xff", "version.cfg": ""})
    (tmp_path / "runtime" / "version.info").mkdir(parents=True)
    assert installed_release(runtime()) is None


def test_both_variables_are_looked_at(
    write: Callable[[Mapping[str, str]], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write({"toolkit/version.cfg": CONFIGURED})
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "toolkit"))
    assert installed_release(runtime()) == CannRelease.parse("8.0.RC3")


@pytest.mark.npu_sim
@pytest.mark.parametrize(
    ("cann", "functions"),
    [("8.0.RC3", ()), ("8.3.RC1", FUNCTIONS[1:]), ("8.5.0", FUNCTIONS), ("9.2.0-beta.2", FUNCTIONS)],
)
def test_a_simulated_release_has_the_functions_of_the_real_one(
    install_cann_sim: Callable[..., Installation], run_on_sim: Any, cann: str, functions: tuple[str, ...]
) -> None:
    program = (
        "from npugrad_server.acl.libraries import load_runtime\n"
        "from npugrad_server.acl.release import installed_release\n"
        "from npugrad_server.acl.runtime import Runtime\n"
        "bound, _ = load_runtime()\n"
        f"print([name for name in {FUNCTIONS} if bound.has(name)], installed_release(Runtime(bound)))"
    )
    ended = run_on_sim("-c", program, installation=install_cann_sim("split", cann))
    assert ended.output.strip() == f"{list(functions)} {cann}", ended.errors
