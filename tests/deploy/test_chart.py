"""Releases of the chart: schemas, and what in them must agree with the rest of them and with the server.

No cluster takes part. What only a cluster or a card can show is listed in docs/guides/deploying.md.
"""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from helm_python import lint
from jsonschema.exceptions import ValidationError
from packaging.version import Version
from tests.deploy.releases import (
    CHART,
    FEATURES,
    MUTUAL,
    NAME,
    PROFILES,
    ROOT,
    TENANTS,
    Documents,
    chart,
    render,
    settings_of,
    values_of,
)
from tests.deploy.schemas import CUSTOM_KINDS, KUBERNETES, check

from npugrad_server.pages import LIVEZ, PROBE_TIMEOUT_S, READYZ
from npugrad_server.start_checks import ready_timeout_s
from npugrad_server.tenants import parse_tenants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from npugrad_server.config import ServerSettings

DRA_KUBERNETES = Version("1.34")
"""The first with resource.k8s.io/v1."""
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(params=PROFILES)
def profile(request: pytest.FixtureRequest) -> str:
    """Return each profile in turn."""
    return str(request.param)


@pytest.fixture(params=FEATURES)
def release(profile: str, request: pytest.FixtureRequest) -> Documents:
    """Return the objects of each profile with each set of features."""
    return deepcopy(_rendered(profile, request.param))


@cache
def _rendered(profile: str, features: str) -> Documents:
    return render(values_of(profile, FEATURES[features]))


@pytest.fixture
def deployment(release: Documents) -> dict[str, Any]:
    """Return the Deployment."""
    return release["Deployment", NAME]


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


@pytest.fixture
def settings(server: dict[str, Any]) -> ServerSettings:
    """Return the settings that the arguments give the server, read by its own command line."""
    assert "command" not in server, "the image's entrypoint is npugrad-server"
    command, *arguments = server["args"]
    return settings_of(command, arguments)


# ------------------------------------------------------------------------------------------ schemas


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
def test_every_object_meets_the_strict_schema(profile: str, release: Documents, version: str) -> None:
    _validate(profile, release, version)


@pytest.mark.deep
@pytest.mark.parametrize("version", KUBERNETES[1:-1])
def test_every_object_meets_the_strict_schemas_between(profile: str, version: str) -> None:
    _validate(profile, render(values_of(profile, FEATURES["full"])), version)


def _validate(profile: str, release: Documents, version: str) -> None:
    if profile == "dra" and Version(version) < DRA_KUBERNETES:
        pytest.skip(f"dynamic resource allocation is for Kubernetes {DRA_KUBERNETES} and later")
    check(release, version)


@pytest.mark.parametrize(
    ("kind", "path", "named"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0), "readinessProbe"),
        ("HorizontalPodAutoscaler", ("spec", "behavior", "scaleDown"), "stabilizationWindowSeconds"),
        ("ServiceMonitor", ("spec", "endpoints", 0), "interval"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "expr"),
        ("ScaledObject", ("spec", "triggers", 0), "metadata"),
        ("Certificate", ("spec", "privateKey"), "rotationPolicy"),
        ("GRPCRoute", ("spec", "rules", 0, "backendRefs", 0), "port"),
    ],
)
def test_strict_schema_catches_a_misspelt_field(kind: str, path: tuple[str | int, ...], named: str) -> None:
    """Unless it does, the test above proves little: an unknown field is ignored by a cluster."""
    features = "hpa" if kind == "HorizontalPodAutoscaler" else "full"
    release = deepcopy(_rendered("cpu", features))
    place: Any = release[kind, NAME]
    for step in path:
        place = place[step]
    place[f"{named}s"] = place.pop(named)
    with pytest.raises(ValidationError, match=f"{named}s"):
        check(release, KUBERNETES[-1])


def test_custom_kinds_are_those_of_the_chart() -> None:
    kinds = {kind for features in FEATURES for kind, _ in _rendered("cpu", features)}
    assert kinds > CUSTOM_KINDS


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    assert lint(CHART)["errors"] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert chart().metadata["appVersion"] == project["version"]


# ----------------------------------------------------------------------------------------- settings


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
        settings_of("serve", [argument])


def test_server_has_a_worker_for_every_card(
    profile: str, settings: ServerSettings, server: dict[str, Any]
) -> None:
    kind, names = _kind(profile), settings.devices.split(",")
    assert [name.partition("?")[0] for name in names] == [f"{kind}:{index}" for index in range(len(names))]
    cards = [count for resource, count in server["resources"]["limits"].items() if "/" in resource]
    claims = server["resources"].get("claims", [])
    assert (cards or claims) == {"cpu": [], "npu": [len(names)] if profile != "dra" else claims}[kind]


def test_claim_asks_for_every_card() -> None:
    release = render(values_of("dra", {"devices": {"count": 3}}))
    (request,) = release["ResourceClaimTemplate", f"{NAME}-cards"]["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 3
    pod = release["Deployment", NAME]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": request["name"], "resourceClaimTemplateName": f"{NAME}-cards"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": request["name"]}]


def test_server_is_reachable_from_outside_the_pod(settings: ServerSettings, server: dict[str, Any]) -> None:
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    metrics = settings.metrics_address
    assert metrics is not None
    assert (settings.listen_address.host, settings.listen_address.port) == ("0.0.0.0", ports["grpc"])
    assert (metrics.host, metrics.port) == ("0.0.0.0", ports["metrics"])


def test_server_listens_on_ipv6_where_it_is_told_to() -> None:
    deployment = render(values_of("cpu", {"service": {"listenAddress": "[::]"}}))["Deployment", NAME]
    command, *arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    made = settings_of(command, arguments)
    assert made.metrics_address is not None
    assert {made.listen_address.host, made.metrics_address.host} == {"::"}


def test_server_has_its_certificate_or_serves_plaintext(
    settings: ServerSettings, pod: dict[str, Any], server: dict[str, Any]
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert settings.insecure == ("tls" not in volumes)
    if settings.insecure:
        return
    folder = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}["tls"]
    assert (settings.tls_certificate, settings.tls_key) == (f"{folder}/tls.crt", f"{folder}/tls.key")
    assert (settings.tls_client_ca is not None) == ("callers" in volumes)
    # A mount of a whole Secret is swapped when it changes; one with a subPath is not.
    assert all("subPath" not in mount for mount in server["volumeMounts"])


@pytest.mark.parametrize(
    ("source", "volume"),
    [
        ({"file": TENANTS}, {"configMap": {"name": f"{NAME}-tenants", "defaultMode": 0o440}}),
        ({"configMapName": "mine"}, {"configMap": {"name": "mine", "defaultMode": 0o440}}),
        ({"secretName": "mine"}, {"secret": {"secretName": "mine", "defaultMode": 0o440}}),
    ],
)
def test_server_reads_tenants_from_a_mounted_folder(source: dict[str, Any], volume: dict[str, Any]) -> None:
    release = render(values_of("cpu", MUTUAL, {"tenants": source}))
    pod = release["Deployment", NAME]["spec"]["template"]["spec"]
    command, *arguments = pod["containers"][0]["args"]
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tenants")
    assert {"name": "tenants", **volume} in pod["volumes"]
    assert settings_of(command, arguments).tenants == f"{mount['mountPath']}/tenants.toml"
    assert "subPath" not in mount, "the kubelet would never update it"
    assert (("ConfigMap", f"{NAME}-tenants") in release) == ("file" in source)


@pytest.mark.parametrize(
    "text", [TENANTS, TENANTS.rstrip(), f"  # indented\n\n{TENANTS}# ä: {{{{ }}}}\t\n\n"]
)
def test_file_of_tenants_arrives_as_it_was_given(text: str) -> None:
    release = render(values_of("cpu", MUTUAL, {"tenants": {"file": text}}))
    found = release["ConfigMap", f"{NAME}-tenants"]["data"]
    assert found == {"tenants.toml": text}
    table = parse_tenants("tenants.toml", found["tenants.toml"].encode())
    assert {tenant.name for tenant in table.listed.values()} == {"vision"}


def test_grace_period_covers_the_longest_drain(
    settings: ServerSettings, pod: dict[str, Any], server: dict[str, Any]
) -> None:
    """The server itself goes on serving until load balancers know; a preStop hook would come on top."""
    assert "lifecycle" not in server
    spare_s = 15
    assert settings.drain_delay_s > 0
    parts = (settings.drain_delay_s, settings.drain_timeout_s, settings.hang_grace_s, spare_s)
    assert pod["terminationGracePeriodSeconds"] == sum(parts)


def test_connections_end_now_and_then_but_no_call_does(settings: ServerSettings) -> None:
    """Else clients never look the name up again, and never see a pod that was added."""
    assert settings.max_connection_age_s is not None
    assert settings.max_connection_age_grace_s is not None
    longest_s = settings.upload_idle_timeout_s + settings.run_limit_s + settings.reply_idle_timeout_s
    assert settings.max_connection_age_grace_s >= longest_s + settings.hang_grace_s


def test_server_without_a_device_is_restarted_but_not_while_one_starts(settings: ServerSettings) -> None:
    assert settings.liveness_down_limit_s is not None
    assert settings.liveness_down_limit_s > ready_timeout_s(settings)


def test_memory_limit_holds_arenas_and_processes(
    profile: str, settings: ServerSettings, server: dict[str, Any]
) -> None:
    assert settings.input_arena_bytes is not None
    assert settings.output_arena_bytes is not None
    devices = len(settings.devices.split(","))
    arenas = settings.input_arena_bytes + devices * settings.output_arena_bytes
    room = {"npu": 8 << 30, "cpu": 3 << 30}[_kind(profile)]
    assert _bytes(server["resources"]["limits"]["memory"]) == arenas + room


# ---------------------------------------------------------------------------------------- resources


def test_requests_are_the_limits(server: dict[str, Any]) -> None:
    resources = server["resources"]
    assert resources["requests"] == resources["limits"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["limits"])


def test_node_storage_holds_every_scratch_volume(pod: dict[str, Any], server: dict[str, Any]) -> None:
    volumes = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert sum(map(_bytes, volumes)) <= _bytes(server["resources"]["limits"]["ephemeral-storage"])


def test_update_never_waits_for_a_card_that_is_taken(profile: str, deployment: dict[str, Any]) -> None:
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    no_card = {"maxSurge": 1, "maxUnavailable": 0}
    assert rolling == (no_card if profile == "cpu" else {"maxSurge": 0, "maxUnavailable": 1})


def test_taints_of_the_device_plugin_are_tolerated(profile: str, pod: dict[str, Any]) -> None:
    tolerations = pod.get("tolerations", [])
    plugin = {"huawei.com/Ascend910", "huawei.com/Ascend310P", "huawei.com/npu"}
    assert {each["key"] for each in tolerations} == (set() if profile == "cpu" else plugin)
    assert all(each["operator"] == "Exists" and each["effect"] == "NoSchedule" for each in tolerations)


def test_volcano_names_the_cards_and_the_device_plugin_does_otherwise(
    profile: str, deployment: dict[str, Any], server: dict[str, Any]
) -> None:
    template = deployment["spec"]["template"]
    env = {each["name"]: each for each in server.get("env", [])}
    is_volcano = profile == "mindcluster-volcano"
    assert ("ASCEND_VISIBLE_DEVICES" in env) == is_volcano, "elsewhere it would be empty"
    assert (template["spec"].get("schedulerName") == "volcano") == is_volcano
    if is_volcano:
        (card,) = (resource for resource in server["resources"]["limits"] if "/" in resource)
        path = env["ASCEND_VISIBLE_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == f"metadata.annotations['{card}']"
        assert template["metadata"]["labels"]["fault-scheduling"] == "force"


# ----------------------------------------------------------------------------------------- security


def test_every_pod_meets_the_restricted_standard(release: Documents) -> None:
    for (kind, _), document in release.items():
        if kind not in ("Deployment", "Job"):
            continue
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        assert kinds <= {"emptyDir", "secret", "configMap"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "a Service's variables begin like the settings' ones"


def test_writable_paths_are_those_of_the_image(pod: dict[str, Any], server: dict[str, Any]) -> None:
    home = re.search(r"\bHOME=(\S+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert home is not None
    mounts = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    assert mounts == {home[1], "/tmp"}
    assert {mount["name"] for mount in server["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


# ------------------------------------------------------------------------------------ probes, ports


@pytest.mark.parametrize(
    ("probe", "path"), [("startupProbe", READYZ), ("readinessProbe", READYZ), ("livenessProbe", LIVEZ)]
)
def test_probe_asks_the_metrics_port(server: dict[str, Any], probe: str, path: str) -> None:
    """Over HTTP, because the kubelet's gRPC probe speaks no TLS."""
    assert server[probe]["httpGet"] == {"path": path, "port": "metrics"}
    assert not {"exec", "grpc", "tcpSocket", "terminationGracePeriodSeconds"} & set(server[probe])
    assert PROBE_TIMEOUT_S < server[probe]["timeoutSeconds"] <= server[probe]["periodSeconds"]


def test_startup_probe_waits_until_the_server_gives_up(
    settings: ServerSettings, server: dict[str, Any]
) -> None:
    """Then the log ends with what every device failed of, and not with a signal."""
    startup, imports_s = server["startupProbe"], 10
    until_the_last_s = startup["periodSeconds"] * (startup["failureThreshold"] - 1)
    assert until_the_last_s >= ready_timeout_s(settings) + imports_s


def test_rollout_waits_longer_than_a_start_and_an_end_may_take(
    deployment: dict[str, Any], pod: dict[str, Any], server: dict[str, Any]
) -> None:
    startup = server["startupProbe"]
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert start_s + pod["terminationGracePeriodSeconds"] < deployment["spec"]["progressDeadlineSeconds"]


def test_selectors_find_the_pods_and_their_ports(
    release: Documents, deployment: dict[str, Any], server: dict[str, Any]
) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for (kind, _), document in release.items():
        spec = document.get("spec", {})
        if kind == "Service":
            assert spec["selector"].items() <= labels.items()
            assert all(port["port"] == ports[port["targetPort"]] for port in spec["ports"])
        elif kind == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        elif kind == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == set(ports)
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            assert "replicas" not in deployment["spec"], "the scaler's number would be overwritten"
        elif kind == "ServiceMonitor":
            headless = release["Service", f"{NAME}-headless"]
            assert spec["selector"]["matchLabels"].items() <= headless["metadata"]["labels"].items()
            assert {each["port"] for each in spec["endpoints"]} <= {
                port["name"] for port in headless["spec"]["ports"]
            }


def test_certificate_names_both_services_and_fills_the_mounted_secret() -> None:
    release = render(values_of("cpu", FEATURES["full"]))
    spec = release["Certificate", NAME]["spec"]
    assert {NAME, f"{NAME}-headless", "npugrad.example"} <= set(spec["dnsNames"])
    volumes = release["Deployment", NAME]["spec"]["template"]["spec"]["volumes"]
    assert spec["secretName"] in {volume.get("secret", {}).get("secretName") for volume in volumes}


def test_services_are_one_address_and_every_address(release: Documents) -> None:
    cluster, headless = release["Service", NAME]["spec"], release["Service", f"{NAME}-headless"]["spec"]
    assert (cluster["type"], cluster.get("clusterIP")) == ("ClusterIP", None)
    assert headless["clusterIP"] == "None"
    assert "metrics" in {port["name"] for port in headless["ports"]}


def test_profiles_cannot_run_side_by_side() -> None:
    """One Service must never mix results of an NPU with results of a CPU."""
    npu, cpu = (render(values_of(name))["Deployment", NAME] for name in ("mindcluster", "cpu"))
    # A selector cannot be changed: with another one, an upgrade from one to the other would fail.
    assert npu["spec"]["selector"] == cpu["spec"]["selector"]


def test_image_says_its_version_and_chip(profile: str) -> None:
    image = render(values_of(profile))["Deployment", NAME]["spec"]["template"]["spec"]["containers"][0][
        "image"
    ]
    version, _, kind = image.partition(":")[2].partition("-")
    assert version == chart().metadata["appVersion"]
    assert kind == ("cpu" if profile == "cpu" else "910b-ubuntu22.04"), "an image works on one chip only"


# ------------------------------------------------------------------------------------------ helpers


def _kind(profile: str) -> str:
    """Return the kind of device of a profile."""
    return "cpu" if profile == "cpu" else "npu"


def _bytes(quantity: str) -> int:
    """Return a Kubernetes quantity such as 20Gi in bytes."""
    match = re.fullmatch(r"(\d+)(\D*)", quantity)
    assert match is not None, quantity
    return int(match[1]) * UNITS[match[2]]
