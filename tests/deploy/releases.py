"""Releases of the chart, rendered without a cluster."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import yaml
from helm_python import Chart
from typer.main import get_command

from npugrad._tools.gen_manifests import CHART, values_of
from npugrad_server.cli import app
from npugrad_server.config import ServerSettings

NAME, NAMESPACE = "npugrad", "gradients"

TENANTS = """gateways = ["edge.example.org"]

[[tenant]]
name = "vision"
identities = ["vision.example.org", "spiffe://example.org/vision"]
weight = 4
"""

MUTUAL: dict[str, Any] = {"tls": {"mutual": True, "clientCaSecretName": "callers"}}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "open": {
        "tls": {"enabled": False},
        "insecure": True,
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "extraArgs": ["--log-level=debug"],
        "extraEnv": [{"name": "ASCEND_GLOBAL_LOG_LEVEL", "value": "3"}],
        "image": {"tag": "mine", "pullSecrets": [{"name": "registry"}]},
    },
    "full": {
        "replicas": 3,
        "devices": {"count": 4, "deterministic": True},
        "tls": {
            "mutual": True,
            "clientCaSecretName": "callers",
            "certificate": {"create": True, "issuer": {"name": "internal"}, "dnsNames": ["npugrad.example"]},
        },
        "tenants": {"file": TENANTS},
        "autoscaling": {"kind": "keda"},
        "networkPolicy": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
        "grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["npugrad.example"]},
        "loadTest": {"enabled": True, "image": "npugrad:bench", "clientSecretName": "load-test"},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "npugrad"}},
            }
        ],
        "priorityClassName": "batch",
        "podAnnotations": {"example/team": "vision"},
        "podLabels": {"team": "vision"},
    },
    "hpa": {"autoscaling": {"kind": "hpa", "minReplicas": 2}},
}
"""Values beside a profile's."""

Documents = dict[tuple[str, str], dict[str, Any]]
"""The objects of a release by kind and name."""


@cache
def chart() -> Chart:
    """The chart; loaded once, as nothing changes it."""
    return Chart.load(CHART)


def render(values: dict[str, Any], namespace: str = NAMESPACE) -> Documents:
    """The objects of a release, as an install would make them.

    Raises:
        HelmValuesError: The schema refuses the values.
        HelmRenderError: They contradict each other.
    """
    chart().validate_schema(chart().merge_values(values))
    documents: Documents = {}
    for path, text in chart().render(values, name=NAME, namespace=namespace).items():
        if path.endswith(".yaml"):
            for document in yaml.safe_load_all(text):
                if document is not None:
                    key = document["kind"], document["metadata"]["name"]
                    assert key not in documents, f"{path}: a second {key}"
                    documents[key] = document
    return documents


def settings_of(command: str, arguments: list[str]) -> ServerSettings:
    """The settings that the arguments of one command give, read by its own command line; nothing is run."""
    given = _commands().commands[command].make_context(command, list(arguments)).params
    return ServerSettings.model_validate({name: value for name, value in given.items() if value is not None})


@cache
def _commands() -> Any:
    return get_command(app)


class Release:
    """What an install of a profile makes, with other values on top; nothing of it is changed by who looks."""

    def __init__(self, profile: str, *others: dict[str, Any]) -> None:
        self.profile, self._others = profile, others
        self.objects = render(values_of(profile, *others))
        (self.deployment,) = (made for (kind, _), made in self.objects.items() if kind == "Deployment")
        self.pod: dict[str, Any] = self.deployment["spec"]["template"]["spec"]
        (self.server,) = self.pod["containers"]

    def __repr__(self) -> str:
        return f"Release({self.profile}, {', '.join(map(str, self._others))})"

    @property
    def kind(self) -> str:
        return "cpu" if self.profile == "cpu" else "npu"

    @cached_property
    def settings(self) -> ServerSettings:
        """Those that the arguments give the server, read by its own command line."""
        assert "command" not in self.server, "the image's entrypoint is npugrad-server"
        command, *arguments = self.server["args"]
        return settings_of(command, arguments)


@cache
def release(profile: str, features: str = "plain") -> Release:
    """The release of a profile with a set of features."""
    return Release(profile, FEATURES[features])
