"""Writes the plain Kubernetes manifests from the Helm chart, for clusters without Helm.

python protos/npugrad/_tools/gen_manifests.py            writes deploy/kubernetes
python protos/npugrad/_tools/gen_manifests.py --check    fails when a file differs
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/npugrad"
FOLDER = ROOT / "deploy/kubernetes"
PROFILES = {"npu.yaml": "mindcluster", "cpu.yaml": "cpu"}
"""Each file with the profile from which it is rendered."""
_HEAD = """\
# Rendered from deploy/helm/npugrad with profiles/{profile}.yaml by `make gen`; edit the chart, not this file.
# npu.yaml and cpu.yaml share their names on purpose: only one of them can be in a namespace, so a Service
# never mixes results of an NPU with results of a CPU.
# The Secret npugrad-tls must exist: kubectl create secret tls npugrad-tls --cert=tls.crt --key=tls.key
"""


def rendered(name: str) -> str:
    """The text of one of the files."""
    profile = PROFILES[name]
    values = yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text("utf-8"))
    with Chart.load(CHART) as chart:
        found = chart.render(values, name="npugrad", namespace="default")
    parts = [text.strip() for path, text in sorted(found.items()) if path.endswith(".yaml") and text.strip()]
    text = _HEAD.format(profile=profile) + "".join(f"---\n{part}\n" for part in parts)
    # Helm does not manage what kubectl applies.
    return "".join(line for line in text.splitlines(True) if "app.kubernetes.io/managed-by:" not in line)


def main(arguments: list[str]) -> int:
    """Writes the files, or compares them; returns the exit status."""
    stale = [name for name in PROFILES if _differs(FOLDER / name, rendered(name))]
    if "--check" in arguments:
        for name in stale:
            print(f"{FOLDER.relative_to(ROOT) / name}: found other text than the chart makes; run make gen")
        return bool(stale)
    for name in stale:
        (FOLDER / name).write_text(rendered(name), "utf-8")
    return 0


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text("utf-8") != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
