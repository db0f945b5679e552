"""The Kubernetes manifests: schemas, and what in them must agree with the rest of them and with the server.

No cluster takes part. What only a cluster or a card can show is listed in deploy/README.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions, major_minor
from packaging.version import Version
from typer.main import get_command

from npugrad_server.cli import app
from npugrad_server.config import ServerSettings
from npugrad_server.pages import LIVEZ, PROBE_TIMEOUT_S, READYZ
from npugrad_server.preflight import ready_timeout_s

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
DEPLOYMENTS = ("deployment-npu.yaml", "deployment-cpu.yaml")
SERVICES = ("service.yaml", "service-headless.yaml")
OLDEST_KUBERNETES = Version("1.30")
KUBERNETES = [major_minor(version) for version in all_versions() if Version(version) >= OLDEST_KUBERNETES]

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# What the processes themselves may need: interpreter, gRPC, scratch of the kernels, on a card also CANN and
# pinned staging memory. Estimates, to be measured on a node.
ROOM_BYTES = {"npu": 8 << 30, "cpu": 3 << 30}


@pytest.fixture(params=DEPLOYMENTS)
def name(request: pytest.FixtureRequest) -> str:
    """Return the file name of each Deployment in turn."""
    return str(request.param)


@pytest.fixture
def deployment(name: str) -> dict[str, Any]:
    """Return the Deployment."""
    return _load(name)


@pytest.fixture
def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the Deployment's pod spec."""
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def server(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the pod's only container."""
    (container,) = pod["containers"]
    assert isinstance(container, dict)
    return container


# ------------------------------------------------------------------------------------------ schemas


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", [*DEPLOYMENTS, *SERVICES])
def test_manifest_meets_the_strict_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(_load(name), version, strict=True)


def test_strict_schema_catches_a_misspelt_probe() -> None:
    """Unless it does, the test above proves little: an unknown field is ignored by a cluster."""
    manifest = _load("deployment-npu.yaml")
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)


# ----------------------------------------------------------------------------------------- settings


def test_every_argument_is_a_flag_of_the_server(name: str, server: dict[str, Any]) -> None:
    """The command line refuses an unknown name, the settings a wrong unit and plaintext by accident."""
    assert "command" not in server, "the image's entrypoint is npugrad-server"
    assert server["args"][0] == "serve"
    settings = _settings(name)
    assert settings.devices == f"{_kind(name)}:0"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--drain-timeout=120", "No such option"),
        ("--drain-timeout-s=2min", "valid number"),
        ("--listen=0.0.0.0:50051", "--insecure"),
    ],
)
def test_wrong_argument_would_be_found(argument: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        _parse("serve", [argument])


def test_server_is_reachable_from_outside_the_pod(name: str, server: dict[str, Any]) -> None:
    settings = _settings(name)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    metrics = settings.metrics_address
    assert metrics is not None
    assert (settings.listen_address.host, settings.listen_address.port) == ("0.0.0.0", ports["grpc"])
    assert (metrics.host, metrics.port) == ("0.0.0.0", ports["metrics"])
    assert settings.insecure, "without TLS an address that is not loopback needs it"


def test_grace_period_covers_the_longest_drain(
    name: str, pod: dict[str, Any], server: dict[str, Any]
) -> None:
    """The server itself goes on serving until load balancers know; a preStop hook would come on top."""
    assert "lifecycle" not in server
    settings, spare_s = _settings(name), 15
    assert settings.drain_delay_s > 0
    parts = (settings.drain_delay_s, settings.drain_timeout_s, settings.hang_grace_s, spare_s)
    assert pod["terminationGracePeriodSeconds"] == sum(parts)
    told = re.search(
        r"# (\d+) --drain-delay-s \+ (\d+) --drain-timeout-s \+ (\d+) --hang-grace-s \+ (\d+) .*"
        r" = (\d+) seconds",
        (FOLDER / name).read_text("utf-8"),
    )
    assert told is not None
    assert [float(number) for number in told.groups()] == [*parts, sum(parts)]


def test_connections_end_now_and_then_but_no_call_does(name: str) -> None:
    """Else clients never look the name up again, and never see a pod that was added."""
    settings = _settings(name)
    assert settings.max_connection_age_s is not None
    assert settings.max_connection_age_grace_s is not None
    longest_s = settings.upload_idle_timeout_s + settings.run_limit_s + settings.reply_idle_timeout_s
    assert settings.max_connection_age_grace_s >= longest_s + settings.hang_grace_s


def test_server_without_a_device_is_restarted_but_not_while_one_starts(name: str) -> None:
    settings = _settings(name)
    assert settings.liveness_down_limit_s is not None
    assert settings.liveness_down_limit_s > ready_timeout_s(settings)


def test_memory_limit_holds_arenas_and_processes(name: str, server: dict[str, Any]) -> None:
    settings = _settings(name)
    assert settings.input_arena_bytes is not None
    assert settings.output_arena_bytes is not None
    devices = len(settings.devices.split(","))
    arenas = settings.input_arena_bytes + devices * settings.output_arena_bytes
    limit = _bytes(server["resources"]["limits"]["memory"])
    assert limit >= arenas + ROOM_BYTES[_kind(name)]


def test_scheduled_drain_of_a_node_is_not_shortened_by_the_probes(server: dict[str, Any]) -> None:
    """A liveness failure ends a pod with the same grace, unless the probe sets a shorter one of its own."""
    assert "terminationGracePeriodSeconds" not in server["livenessProbe"]


# ---------------------------------------------------------------------------------------- resources


def test_requests_are_the_limits(server: dict[str, Any]) -> None:
    resources = server["resources"]
    assert resources["requests"] == resources["limits"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["limits"])


def test_npu_takes_one_card_and_names_it_once() -> None:
    limits = _container("deployment-npu.yaml")["resources"]["limits"]
    (card,) = (resource for resource in limits if "/" in resource)
    assert limits[card] == 1
    # As text, because YAML's anchor makes one line appear twice once it is loaded.
    lines = (FOLDER / "deployment-npu.yaml").read_text("utf-8").splitlines()
    assert sum(line.strip().startswith(f"{card}:") for line in lines) == 1


def test_cpu_takes_no_card() -> None:
    assert set(_container("deployment-cpu.yaml")["resources"]["limits"]) == {
        "cpu",
        "memory",
        "ephemeral-storage",
    }


def test_node_storage_holds_every_scratch_volume(pod: dict[str, Any], server: dict[str, Any]) -> None:
    scratch = sum(_bytes(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"])
    assert scratch <= _bytes(server["resources"]["limits"]["ephemeral-storage"])


def test_update_never_waits_for_a_card_that_is_taken() -> None:
    strategy = _load("deployment-npu.yaml")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_taints_of_the_device_plugin_are_tolerated() -> None:
    tolerations = _load("deployment-npu.yaml")["spec"]["template"]["spec"]["tolerations"]
    assert {each["key"] for each in tolerations} == {
        "huawei.com/Ascend910",
        "huawei.com/Ascend310P",
        "huawei.com/npu",
    }
    assert all(each["operator"] == "Exists" and each["effect"] == "NoSchedule" for each in tolerations)


# ----------------------------------------------------------------------------------------- security


def test_pod_meets_the_restricted_standard(pod: dict[str, Any], server: dict[str, Any]) -> None:
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(set(volume) == {"name", "emptyDir"} for volume in pod["volumes"])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_pod_has_no_token_and_no_service_variables(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "a Service's variables begin like the settings' ones"


def test_writable_paths_are_those_of_the_image(pod: dict[str, Any], server: dict[str, Any]) -> None:
    home = re.search(r"\bHOME=(\S+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert home is not None
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    assert set(mounts) == {home[1], "/tmp"}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}


# ------------------------------------------------------------------------------------ probes, ports


@pytest.mark.parametrize(
    ("probe", "path"), [("startupProbe", READYZ), ("readinessProbe", READYZ), ("livenessProbe", LIVEZ)]
)
def test_probe_asks_the_metrics_port(server: dict[str, Any], probe: str, path: str) -> None:
    """Over HTTP, because the kubelet's gRPC probe speaks no TLS."""
    assert server[probe]["httpGet"] == {"path": path, "port": "metrics"}
    assert "metrics" in {port["name"] for port in server["ports"]}
    assert not {"exec", "grpc", "tcpSocket"} & set(server[probe])
    assert PROBE_TIMEOUT_S < server[probe]["timeoutSeconds"] <= server[probe]["periodSeconds"]


def test_startup_probe_waits_until_the_server_gives_up(name: str) -> None:
    """Then the log ends with what every device failed of, and not with a signal."""
    startup = _container(name)["startupProbe"]
    until_the_last_s = startup["periodSeconds"] * (startup["failureThreshold"] - 1)
    imports_s = 10
    assert until_the_last_s >= ready_timeout_s(_settings(name)) + imports_s


def test_rollout_waits_longer_than_a_start_and_an_end_may_take(name: str) -> None:
    spec, startup = _load(name)["spec"], _container(name)["startupProbe"]
    kubernetes_default = 600
    deadline = spec.get("progressDeadlineSeconds", kubernetes_default)
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_s + spec["template"]["spec"]["terminationGracePeriodSeconds"] < deadline


@pytest.mark.parametrize("service", SERVICES)
def test_service_finds_the_pods_and_their_ports(name: str, service: str) -> None:
    deployment, spec = _load(name), _load(service)["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert spec["selector"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in _container(name)["ports"]}
    assert {port["targetPort"] for port in spec["ports"]} <= set(ports)
    assert all(port["port"] == ports[port["targetPort"]] for port in spec["ports"])


def test_services_are_one_address_and_every_address() -> None:
    cluster, headless = (_load(name)["spec"] for name in SERVICES)
    assert (cluster["type"], cluster.get("clusterIP")) == ("ClusterIP", None)
    assert headless["clusterIP"] == "None"
    assert "metrics" in {port["name"] for port in headless["ports"]}


# ------------------------------------------------------------------------------------- the whole set


def test_npu_and_cpu_cannot_run_side_by_side() -> None:
    npu, cpu = map(_load, DEPLOYMENTS)
    assert npu["metadata"]["name"] == cpu["metadata"]["name"]
    # A selector cannot be changed: with another one, applying the second file over the first would fail.
    assert npu["spec"]["selector"] == cpu["spec"]["selector"]


def test_kustomization_names_what_exists() -> None:
    kustomization = _load("kustomization.yaml")
    resources = kustomization["resources"]
    assert {*resources, *DEPLOYMENTS} == {*DEPLOYMENTS, *SERVICES}
    assert len(set(resources) & set(DEPLOYMENTS)) == 1
    (image,) = kustomization["images"]
    assert {_container(name)["image"].partition(":")[0] for name in DEPLOYMENTS} == {image["name"]}


def test_image_is_of_this_version_and_says_its_kind(name: str, server: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    version, _, kind = server["image"].partition(":")[2].partition("-")
    assert version == project["project"]["version"]
    assert (kind == "cpu") == (name == "deployment-cpu.yaml")
    assert kind, "the tag names the chip, or cpu: an image works on no other"


# ------------------------------------------------------------------------------------------ helpers


def _load(name: str) -> dict[str, Any]:
    """Return the only document of a file."""
    document = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    assert isinstance(document, dict)
    return document


def _container(name: str) -> dict[str, Any]:
    """Return the only container of a Deployment."""
    (container,) = _load(name)["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def _kind(name: str) -> str:
    """Return the device kind of a Deployment's file: npu or cpu."""
    return name.removeprefix("deployment-").removesuffix(".yaml")


def _settings(name: str) -> ServerSettings:
    """Return the settings that a Deployment's arguments give the server, read by its own command line."""
    command, *arguments = _container(name)["args"]
    return _parse(command, arguments)


def _parse(command: str, arguments: list[str]) -> ServerSettings:
    """Return the settings of one command, without running it."""
    group: Any = get_command(app)
    given = group.commands[command].make_context(command, list(arguments)).params
    return ServerSettings.model_validate(
        {field: value for field, value in given.items() if value is not None}
    )


def _bytes(quantity: str) -> int:
    """Return a Kubernetes quantity such as 20Gi in bytes."""
    match = re.fullmatch(r"(\d+)(\D*)", quantity)
    assert match is not None, quantity
    return int(match[1]) * UNITS[match[2]]
