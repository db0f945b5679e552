"""Writes the plain Kubernetes manifests from the Helm chart, for clusters without Helm.

python protos/npugrad/_tools/gen_manifests.py                  writes deploy/kubernetes
python protos/npugrad/_tools/gen_manifests.py --check          fails when a file differs
python protos/npugrad/_tools/gen_manifests.py --profile hami   prints the objects of a profile: `make chart`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, HelmError

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy/helm/npugrad"
FOLDER = ROOT / "deploy/kubernetes"
FILES = {"npu.yaml": "mindcluster", "cpu.yaml": "cpu"}
"""Each file with the profile from which it is rendered."""
PROFILES = sorted(path.stem for path in (CHART / "profiles").glob("*.yaml"))
_HEAD = """\
# Rendered from deploy/helm/npugrad with profiles/{profile}.yaml by `make gen`; edit the chart, not this file.
# npu.yaml and cpu.yaml share their names on purpose: only one of them can be in a namespace, so a Service
# never mixes results of an NPU with results of a CPU.
# The Secret npugrad-tls must exist: kubectl create secret tls npugrad-tls --cert=tls.crt --key=tls.key
"""


def values_of(profile: str, *others: dict[str, Any]) -> dict[str, Any]:
    """The values of a profile, with others on top of them as Helm lays them."""
    values: dict[str, Any] = yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text("utf-8"))
    for other in others:
        values = laid_on(values, other)
    return values


def laid_on(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Values on top of others, as Helm lays them."""
    nested = {
        key: laid_on(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **nested}


def rendered(values: dict[str, Any], namespace: str = "default") -> str:
    """The objects of a release, without what says that Helm manages them.

    Raises:
        HelmError: The schema refuses the values, or they contradict each other.
    """
    with Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        found = chart.render(values, name="npugrad", namespace=namespace)
    parts = [text.strip() for path, text in sorted(found.items()) if path.endswith(".yaml") and text.strip()]
    lines = "".join(f"---\n{part}\n" for part in parts).splitlines(True)
    return "".join(line for line in lines if "app.kubernetes.io/managed-by:" not in line)


def main(arguments: list[str]) -> int:
    """Writes the files, compares them, or prints the objects of a profile; returns the exit status."""
    parser = argparse.ArgumentParser(prog="gen_manifests.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when a file differs")
    parser.add_argument("--profile", choices=PROFILES, help="print the objects of this profile instead")
    parser.add_argument("--values", action="append", type=Path, default=[], help="YAML file on top of it")
    parser.add_argument("--namespace", default="default", help="namespace of the release")
    given = parser.parse_args(arguments)
    if given.profile:
        return _print(given.profile, given.values, given.namespace)
    texts = {
        name: _HEAD.format(profile=profile) + rendered(values_of(profile)) for name, profile in FILES.items()
    }
    stale = [name for name, text in texts.items() if _differs(FOLDER / name, text)]
    for name in stale:
        if given.check:
            print(f"{FOLDER.relative_to(ROOT) / name}: found other text than the chart makes; run make gen")
        else:
            (FOLDER / name).write_text(texts[name], "utf-8")
    return bool(stale) if given.check else 0


def _print(profile: str, files: list[Path], namespace: str) -> int:
    try:
        others = [yaml.safe_load(path.read_text("utf-8")) or {} for path in files]
        sys.stdout.write(rendered(values_of(profile, *others), namespace))
    except (OSError, yaml.YAMLError, HelmError) as error:
        print(f"chart: {error}", file=sys.stderr)
        return 1
    return 0


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text("utf-8") != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
