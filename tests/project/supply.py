"""`python -m tests.project.supply`: what a release is made of, its known flaws, and what it lacks.

- Bills of materials (CycloneDX) under ``dist``: of each wheel with what it needs, as a fresh environment has
  it (`make wheels` writes them), and of the image of the Dockerfile.
- An audit of the image's pins by pip-audit. An advisory database that cannot be reached is a failure, too.
- What only a maintainer can fill in: the digest of the base image, and an address for reports.

``SUPPLY`` in the environment is the folder of `cyclonedx-py` and `pip-audit`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from tests.project.distributions import CLIENT, PARTS, ROOT, SERVER, Environment

import npugrad

DIST = ROOT / "dist"
PINS = ROOT / "deploy" / "image" / "requirements-server.txt"
_BASE = re.compile(r"^ARG BASE=(\S+)$", re.MULTILINE)
_ADDRESS = re.compile(r"https://\S+|[\w.+-]+@[\w-]+\.[\w.]+")
_SPECIFICATION = ("--spec-version", "1.6", "--output-reproducible", "--output-format", "JSON")


def main() -> int:
    """Writes the image's bill, audits its pins and lists the gaps; 0 when nothing is wrong."""
    DIST.mkdir(exist_ok=True)
    print(f"release: {bill_of_image(DIST / f'npugrad-image-{npugrad.__version__}.cdx.json')}")
    texts = {name: (ROOT / name).read_text("utf-8") for name in ("Dockerfile", "SECURITY.md")}
    problems = [*audit(PINS), *gaps(texts["Dockerfile"], texts["SECURITY.md"])]
    for problem in problems:
        print(f"release: {problem}")
    return bool(problems)


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the tools."""
    command = [str(Path(os.environ.get("SUPPLY", "")) / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def bills_of_wheels(folder: Path) -> list[str]:
    """Writes the bills of both wheels in ``dist``, each from an environment of its own under the folder."""
    said = []
    for name, wanted in ((CLIENT, CLIENT), (SERVER, f"{CLIENT}[server]")):
        fresh = Environment.installed(folder / name, wanted, DIST)
        path = DIST / f"{name}-{npugrad.__version__}.cdx.json"
        root = ("--pyproject", str(PARTS[name] / "pyproject.toml"), "--mc-type", "library")
        said.append(_written(path, "environment", *root, str(fresh.folder / "bin" / "python")))
    return said


def bill_of_image(path: Path) -> str:
    """Writes the bill of the image: base, our packages and the pins for the base's Python."""
    (base,) = _BASE.findall((ROOT / "Dockerfile").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text("\n".join(_pins_for(base)), "utf-8")
        said = _written(path, "requirements", str(pins))
    bill = json.loads(path.read_text("utf-8"))
    own = {"version": npugrad.__version__}
    bill["metadata"]["component"] = {"type": "container", "name": "npugrad", "bom-ref": "image", **own}
    bill["components"] += [
        {"type": "container", "name": base, "bom-ref": "base"},
        *({"type": "library", "name": name, "bom-ref": name, **own} for name in PARTS),
    ]
    path.write_text(json.dumps(bill, indent=2) + "\n", "utf-8")
    return said


def _pins_for(base: str) -> list[str]:
    """The pins that hold for the Python of a base such as ``python:3.11.15``."""
    (version,) = re.findall(r":(\d+\.\d+\.\d+)", base)
    python = {"python_full_version": version, "python_version": version.rpartition(".")[0]}
    lines = re.findall(r"^\w.*==.*?(?= \\)", PINS.read_text("utf-8"), re.MULTILINE)
    pins = map(Requirement, lines)
    return [f"{pin.name}{pin.specifier}" for pin in pins if pin.marker is None or pin.marker.evaluate(python)]


def _written(path: Path, *arguments: str) -> str:
    done = tool("cyclonedx-py", *arguments, *_SPECIFICATION, "--output-file", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return f"{path.name}: {len(json.loads(path.read_text('utf-8'))['components'])} components"


def audit(pins: Path) -> list[str]:
    """What is wrong with pinned packages: each known flaw, or that nobody could tell."""
    options = ("--disable-pip", "--require-hashes", "--format", "json", "--progress-spinner", "off")
    done = tool("pip-audit", *options, "--requirement", str(pins))
    try:
        found = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return [f"audit: no advisory database was reached, so nothing is known: {last}"]
    problems = []
    for each in found:
        for flaw in each.get("vulns", ()):
            fixed = ", ".join(flaw["fix_versions"]) or "none"
            problems.append(f"audit: {each['name']} {each['version']}: {flaw['id']}; fixed in {fixed}")
    if missed := [each["name"] for each in found if "skip_reason" in each]:
        told = f"told nothing of {len(missed)} of {len(found)} packages, such as {missed[0]}"
        problems.append(f"audit: the advisory database {told}; run this where the public one can be reached")
    return problems


def gaps(dockerfile: str, security: str) -> list[str]:
    """What a release has to have, and these two files do not."""
    (base,) = _BASE.findall(dockerfile)
    found = []
    if "@sha256:" not in base:
        found.append(f"Dockerfile: BASE: found {base}; expected its digest behind it, {base}@sha256:...")
    if not _ADDRESS.search(security):
        found.append("SECURITY.md: found no address for reports; expected one, https://... or of mail")
    return found


if __name__ == "__main__":
    sys.exit(main())
