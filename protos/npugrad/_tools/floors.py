"""Print the requirements of both distributions for pip: the oldest, or those for another Python version.

``make check-floor`` installs the oldest versions and makes calls with them (tests/project/floor_call.py);
``make check-wheels`` resolves the newest for Python versions that this machine may not have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
# torch and torch_npu are left out: gigabytes, and neither the client nor the CPU service needs them.
EXTRAS = ("bench",)
RESOLVED_EXTRAS = (*EXTRAS, "demo", "otel", "tools", "dev")


def requirements(extras: tuple[str, ...] = ()) -> list[Requirement]:
    """Return what contract, client, server and ``extras`` require, in the order of the files."""
    project, server = (
        tomllib.loads((ROOT / name).read_text("utf-8"))["project"]
        for name in ("pyproject.toml", "server/pyproject.toml")
    )
    lines: list[str] = [*project["dependencies"], *server["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.name != project["name"]]


def oldest(requirement: Requirement) -> str:
    """Return the requirement pinned to its floor, for instance ``numpy==1.26``.

    Raises:
        SystemExit: The requirement has no floor, so the oldest version that was tested is unknown.
    """
    floors = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    if len(floors) != 1:
        raise SystemExit(
            f"floors: {requirement}: found {len(floors)} lower bounds; expected one, as in >=1.2"
        )
    return f"{named(requirement)}=={floors[0]}"


def named(requirement: Requirement) -> str:
    """Return name and extras, for instance ``pydantic-settings[toml]``."""
    extras = ",".join(sorted(requirement.extras))
    return f"{requirement.name}[{extras}]" if extras else requirement.name


def applies(requirement: Requirement, python: str) -> bool:
    """Tell whether the requirement's marker, if any, holds on Python ``python`` (``"3.12"``)."""
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def main() -> None:
    """Print one requirement per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--oldest", action="store_true", help="pinned to the lower bounds")
    form.add_argument("--server", action="store_true", help="as written, without extras")
    form.add_argument("--python", metavar="X.Y", help="as written, markers decided for this Python")
    arguments = parser.parse_args()
    if arguments.oldest:
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(*(oldest(each) for each in requirements(EXTRAS) if applies(each, here)), sep="\n")
    elif arguments.server:
        print(*requirements(), sep="\n")
    else:
        wanted = (each for each in requirements(RESOLVED_EXTRAS) if applies(each, arguments.python))
        print(*(f"{named(each)}{each.specifier}" for each in wanted), sep="\n")


if __name__ == "__main__":
    main()
