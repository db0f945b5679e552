"""Finds which release of CANN is installed, from its runtime or its installer's files, and what goes with it.

Before 8.5 the runtime has another function for it, before 8.1 it has none. If it returns the number of a
component, as a test build does, the installation's files have the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugrad.releases import CannRelease
from npugrad_server.acl.libraries import cann_homes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from npugrad.operator import OpRecord
    from npugrad_server.acl.runtime import Runtime

_FILES = (
    "ascend_toolkit_install.info",
    "*-linux/ascend_toolkit_install.info",
    "version.cfg",
    "share/info/runtime/version.info",
    "version.info",
    "runtime/version.info",
    "compiler/version.info",
    "opp/version.info",
)
"""Below an installation's folder, most trusted first."""
_KEYS = ("version_dir", "version", "toolkit_running_version", "runtime_running_version")
"""Keys in them, most trusted first: besides ``version_dir=8.0.0`` a component has ``Version=7.6.0.1.220``."""

COMPATIBLE = {
    version: span
    for span, versions in {
        ("8.5", "9.2"): ("2.13.0",),
        ("8.5", "9.1"): (
            *("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
            *("2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
            *("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
        ),
        ("8.0", "8.3"): ("2.8.0", "2.7.1", "2.6.0.post3", "2.6.0"),
    }.items()
    for version in versions
}
"""First and last release of CANN that the vendor's release notes declare compatible with a torch_npu."""


def pairing(torch_npu: str, release: CannRelease | None) -> str:
    """What is wrong with a torch_npu on a release of CANN; empty if nothing, or if one is unknown."""
    span = COMPATIBLE.get(torch_npu.partition("+")[0])
    if span is None or release is None:
        return ""
    first, last = map(CannRelease.parse, span)
    if _minor(first) <= _minor(release) <= _minor(last):
        return ""
    return (
        f"found torch_npu {torch_npu} with CANN {release}; expected CANN {first} to {last}, as the vendor "
        "declares for it"
    )


def predating(release: CannRelease | None, record: OpRecord) -> str:
    """Why a release of CANN lacks an operator: it is older; empty if it is not, or is unknown."""
    if release is None or _minor(release) >= _minor(CannRelease.parse(record.min_cann)):
        return ""
    return f"found CANN {release}; expected CANN {record.min_cann} or newer"


def _minor(release: CannRelease) -> tuple[int, int]:
    """What previews share with their release."""
    return release.major, release.minor


def installed_release(runtime: Runtime) -> CannRelease | None:
    """The release of the loaded CANN; None when unknown."""
    for text in (*runtime.versions(), *_written_down()):
        try:
            return CannRelease.parse(text)
        except ValueError:
            continue
    return None


def _written_down() -> Iterator[str]:
    for home in cann_homes():
        for name in _FILES:
            for path in sorted(home.glob(name)):
                yield from _versions(path)


def _versions(path: Path) -> Iterator[str]:
    """A file's versions, such as ``version=8.3.RC1`` or ``toolkit_running_version=[7.5.0.1.129:8.0.RC3]``."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    found = {
        key.strip().lower(): value.strip('[]" \t').rpartition(":")[2]
        for key, equals, value in (line.partition("=") for line in lines)
        if equals
    }
    yield from (found[key] for key in _KEYS if key in found)
