"""Finds which release of CANN is installed: from its runtime, or from files that its installer wrote.

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
