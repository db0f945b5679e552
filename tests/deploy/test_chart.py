"""Releases of the chart: schemas, and what in them must agree with the rest of them and with the server.

No cluster takes part. What only a cluster or a card can show is listed in docs/guides/deploying.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import lint
from jsonschema.exceptions import ValidationError
from packaging.version import Version
from tests.deploy.releases import (
    FEATURES,
    MUTUAL,
    NAME,
    NAMESPACE,
    TENANTS,
    Release,
    chart,
    release,
    settings_of,
)
from tests.deploy.schemas import CUSTOM_KINDS, KUBERNETES, check

import npugrad
from npugrad._tools.gen_manifests import CHART, PROFILES, ROOT, main
from npugrad_server.pages import LIVEZ, PROBE_TIMEOUT_S, READYZ
from npugrad_server.start_checks import ready_timeout_s
from npugrad_server.tenants import parse_tenants

DRA_KUBERNETES = Version("1.34")
"""The first with resource.k8s.io/v1."""
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def every_release(holds: Callable[[Release], None]) -> Callable[[], None]:
    """Makes a test of what holds for each profile with each set of features; a failure shows for which."""

    def test() -> None:
        for profile in PROFILES:
            for features in FEATURES:
                holds(release(profile, features))

    return test


def _bytes(quantity: str) -> int:
    """Return a Kubernetes quantity such as 20Gi in bytes."""
    match = re.fullmatch(r"(\d+)(\D*)", quantity)
    assert match is not None, quantity
    return int(match[1]) * UNITS[match[2]]


def _mounts(found: Release) -> dict[str, Any]:
    return {mount["name"]: mount for mount in found.server["volumeMounts"]}


# ------------------------------------------------------------------------------------------ schemas


@every_release
def test_every_object_meets_the_strict_schema(found: Release) -> None:
    for version in (KUBERNETES[0], KUBERNETES[-1]):
        _validate(found, version)


@pytest.mark.deep
@pytest.mark.parametrize("version", KUBERNETES[1:-1])
def test_every_object_meets_the_strict_schemas_between(version: str) -> None:
    for profile in PROFILES:
        _validate(release(profile, "full"), version)


def _validate(found: Release, version: str) -> None:
    if found.profile != "dra" or Version(version) >= DRA_KUBERNETES:
        check(found.objects, version)


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
    objects = deepcopy(release("cpu", features).objects)
    place: Any = objects[kind, NAME]
    for step in path:
        place = place[step]
    place[f"{named}s"] = place.pop(named)
    with pytest.raises(ValidationError, match=f"{named}s"):
        check(objects, KUBERNETES[-1])


def test_custom_kinds_are_those_of_the_chart() -> None:
    assert {kind for features in FEATURES for kind, _ in release("cpu", features).objects} > CUSTOM_KINDS


def test_make_chart_prints_what_helm_would_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tmp_path / "mine.yaml"
    values.write_text(json.dumps(FEATURES["full"]))  # YAML, too
    assert main(["--profile", "hami", "--values", str(values), "--namespace", NAMESPACE]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    helm = ', "app.kubernetes.io/managed-by": "Helm"'
    expected = json.loads(json.dumps(list(release("hami", "full").objects.values())).replace(helm, ""))
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    values.write_text("replicass: 3")
    assert main(["--profile", "hami", "--values", str(values)]) == 1
    assert "additional properties 'replicass' not allowed" in capsys.readouterr().err


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    assert lint(CHART)["errors"] == []
    assert chart().metadata["appVersion"] == npugrad.__version__


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


@every_release
def test_server_has_a_worker_for_every_card(found: Release) -> None:
    names, resources = found.settings.devices.split(","), found.server["resources"]
    expected = [f"{found.kind}:{index}" for index in range(len(names))]
    assert [name.partition("?")[0] for name in names] == expected
    cards = [count for resource, count in resources["limits"].items() if "/" in resource]
    claims = resources.get("claims", [])
    assert (cards or claims) == {"cpu": [], "npu": [len(names)] if found.profile != "dra" else claims}[
        found.kind
    ]


def test_claim_asks_for_every_card() -> None:
    found = Release("dra", {"devices": {"count": 3}})
    template = found.objects["ResourceClaimTemplate", f"{NAME}-cards"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    name = request["name"]
    assert request["exactly"]["count"] == 3
    assert found.pod["resourceClaims"] == [{"name": name, "resourceClaimTemplateName": f"{NAME}-cards"}]
    assert found.server["resources"]["claims"] == [{"name": name}]


@every_release
def test_server_is_reachable_from_outside_the_pod(found: Release) -> None:
    ports = {port["name"]: port["containerPort"] for port in found.server["ports"]}
    [listen], metrics = found.settings.listen_addresses, found.settings.metrics_address
    assert metrics is not None
    assert (listen.host, listen.port) == ("0.0.0.0", ports["grpc"])
    assert (metrics.host, metrics.port) == ("0.0.0.0", ports["metrics"])


def test_server_listens_on_ipv6_where_it_is_told_to() -> None:
    made = Release("cpu", {"service": {"listenAddress": "[::]"}}).settings
    assert made.metrics_address is not None
    assert {made.listen_addresses[0].host, made.metrics_address.host} == {"::"}


@every_release
def test_server_has_its_certificate_or_serves_plaintext(found: Release) -> None:
    volumes, settings = {volume["name"] for volume in found.pod["volumes"]}, found.settings
    assert settings.insecure == ("tls" not in volumes)
    if settings.insecure:
        return
    folder = _mounts(found)["tls"]["mountPath"]
    assert (settings.tls_certificate, settings.tls_key) == (f"{folder}/tls.crt", f"{folder}/tls.key")
    assert (settings.tls_client_ca is not None) == ("callers" in volumes)
    # A mount of a whole Secret is swapped when it changes; one with a subPath is not.
    assert all("subPath" not in mount for mount in found.server["volumeMounts"])


@pytest.mark.parametrize(
    ("source", "volume"),
    [
        ({"file": TENANTS}, {"configMap": {"name": f"{NAME}-tenants", "defaultMode": 0o440}}),
        ({"configMapName": "mine"}, {"configMap": {"name": "mine", "defaultMode": 0o440}}),
        ({"secretName": "mine"}, {"secret": {"secretName": "mine", "defaultMode": 0o440}}),
    ],
)
def test_server_reads_tenants_from_a_mounted_folder(source: dict[str, Any], volume: dict[str, Any]) -> None:
    found = Release("cpu", MUTUAL, {"tenants": source})
    mount = _mounts(found)["tenants"]
    assert {"name": "tenants", **volume} in found.pod["volumes"]
    assert found.settings.tenants == f"{mount['mountPath']}/tenants.toml"
    assert "subPath" not in mount, "the kubelet would never update it"
    assert (("ConfigMap", f"{NAME}-tenants") in found.objects) == ("file" in source)


@pytest.mark.parametrize(
    "text", [TENANTS, TENANTS.rstrip(), f"  # indented\n\n{TENANTS}# ä: {{{{ }}}}\t\n\n"]
)
def test_file_of_tenants_arrives_as_it_was_given(text: str) -> None:
    found = Release("cpu", MUTUAL, {"tenants": {"file": text}})
    arrived = found.objects["ConfigMap", f"{NAME}-tenants"]["data"]
    assert arrived == {"tenants.toml": text}
    table = parse_tenants("tenants.toml", arrived["tenants.toml"].encode())
    assert {tenant.name for tenant in table.listed.values()} == {"vision"}


@every_release
def test_grace_period_covers_the_longest_drain(found: Release) -> None:
    """The server itself goes on serving until load balancers know; a preStop hook would come on top."""
    assert "lifecycle" not in found.server
    settings, spare_s = found.settings, 15
    assert settings.drain_delay_s > 0
    parts = (settings.drain_delay_s, settings.drain_timeout_s, settings.hang_grace_s, spare_s)
    assert found.pod["terminationGracePeriodSeconds"] == sum(parts)


@every_release
def test_connections_end_now_and_then_but_no_call_does(found: Release) -> None:
    """Else clients never look the name up again, and never see a pod that was added."""
    settings = found.settings
    assert settings.max_connection_age_s is not None
    assert settings.max_connection_age_grace_s is not None
    longest_s = settings.upload_idle_timeout_s + settings.run_limit_s + settings.reply_idle_timeout_s
    assert settings.max_connection_age_grace_s >= longest_s + settings.hang_grace_s


@every_release
def test_server_without_a_device_is_restarted_but_not_while_one_starts(found: Release) -> None:
    assert found.settings.liveness_down_limit_s is not None
    assert found.settings.liveness_down_limit_s > ready_timeout_s(found.settings)


@every_release
def test_memory_limit_holds_arenas_and_processes(found: Release) -> None:
    settings = found.settings
    assert settings.input_arena_bytes is not None
    assert settings.output_arena_bytes is not None
    arenas = settings.input_arena_bytes + len(settings.devices.split(",")) * settings.output_arena_bytes
    room = {"npu": 8 << 30, "cpu": 3 << 30}[found.kind]
    assert _bytes(found.server["resources"]["limits"]["memory"]) == arenas + room


# ---------------------------------------------------------------------------------------- resources


@every_release
def test_requests_are_the_limits_and_node_storage_holds_every_scratch_volume(found: Release) -> None:
    resources = found.server["resources"]
    assert resources["requests"] == resources["limits"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["limits"])
    volumes = [volume["emptyDir"]["sizeLimit"] for volume in found.pod["volumes"] if "emptyDir" in volume]
    assert sum(map(_bytes, volumes)) <= _bytes(resources["limits"]["ephemeral-storage"])


@every_release
def test_update_never_waits_for_a_card_that_is_taken(found: Release) -> None:
    rolling = found.deployment["spec"]["strategy"]["rollingUpdate"]
    no_card = {"maxSurge": 1, "maxUnavailable": 0}
    assert rolling == (no_card if found.kind == "cpu" else {"maxSurge": 0, "maxUnavailable": 1})


@every_release
def test_taints_of_the_device_plugin_are_tolerated(found: Release) -> None:
    tolerations = found.pod.get("tolerations", [])
    plugin = {"huawei.com/Ascend910", "huawei.com/Ascend310P", "huawei.com/npu"}
    assert {each["key"] for each in tolerations} == (set() if found.kind == "cpu" else plugin)
    assert all(each["operator"] == "Exists" and each["effect"] == "NoSchedule" for each in tolerations)


@every_release
def test_volcano_names_the_cards_and_the_device_plugin_does_otherwise(found: Release) -> None:
    env = {each["name"]: each for each in found.server.get("env", [])}
    is_volcano = found.profile == "mindcluster-volcano"
    assert ("ASCEND_VISIBLE_DEVICES" in env) == is_volcano, "elsewhere it would be empty"
    assert (found.pod.get("schedulerName") == "volcano") == is_volcano
    if is_volcano:
        (card,) = (resource for resource in found.server["resources"]["limits"] if "/" in resource)
        path = env["ASCEND_VISIBLE_DEVICES"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert path == f"metadata.annotations['{card}']"
        assert found.deployment["spec"]["template"]["metadata"]["labels"]["fault-scheduling"] == "force"


# ----------------------------------------------------------------------------------------- security


@every_release
def test_every_pod_meets_the_restricted_standard(found: Release) -> None:
    for (kind, _), document in found.objects.items():
        if kind not in ("Deployment", "Job"):
            continue
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == RESTRICTED
        kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
        assert kinds <= {"emptyDir", "secret", "configMap"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "a Service's variables begin like the settings' ones"


@every_release
def test_writable_paths_are_those_of_the_image(found: Release) -> None:
    home = re.search(r"\bHOME=(\S+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert home is not None
    mounts = _mounts(found)
    writable = {mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")}
    assert writable == {home[1], "/tmp"}
    assert mounts.keys() == {volume["name"] for volume in found.pod["volumes"]}


# ------------------------------------------------------------------------------------ probes, ports


@every_release
def test_probes_ask_the_metrics_port(found: Release) -> None:
    """Over HTTP, because the kubelet's gRPC probe speaks no TLS."""
    for probe, path in (("startupProbe", READYZ), ("readinessProbe", READYZ), ("livenessProbe", LIVEZ)):
        asked = found.server[probe]
        assert asked["httpGet"] == {"path": path, "port": "metrics"}, probe
        assert not {"exec", "grpc", "tcpSocket", "terminationGracePeriodSeconds"} & set(asked)
        assert PROBE_TIMEOUT_S < asked["timeoutSeconds"] <= asked["periodSeconds"]


@every_release
def test_startup_probe_and_rollout_wait_longer_than_a_start_and_an_end_may_take(found: Release) -> None:
    """The log then ends with what every device failed of, and not with a signal."""
    startup, imports_s = found.server["startupProbe"], 10
    until_the_last_s = startup["periodSeconds"] * (startup["failureThreshold"] - 1)
    assert until_the_last_s >= ready_timeout_s(found.settings) + imports_s
    start_s = startup["periodSeconds"] * startup["failureThreshold"]
    end_s = found.pod["terminationGracePeriodSeconds"]
    assert start_s + end_s < found.deployment["spec"]["progressDeadlineSeconds"]


@every_release
def test_selectors_find_the_pods_and_their_ports(found: Release) -> None:
    labels = found.deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in found.server["ports"]}
    assert found.deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for (kind, _), document in found.objects.items():
        spec = document.get("spec", {})
        if kind == "Service":
            assert spec["selector"].items() <= labels.items()
            assert all(port["port"] == ports[port["targetPort"]] for port in spec["ports"])
        elif kind == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"].items() <= labels.items()
        elif kind == "NetworkPolicy":
            assert spec["podSelector"]["matchLabels"].items() <= labels.items()
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == set(ports)
            assert all("from" in rule for rule in spec["ingress"] if rule["ports"][0]["port"] == "metrics")
        elif kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert spec["scaleTargetRef"]["name"] == found.deployment["metadata"]["name"]
            assert "replicas" not in found.deployment["spec"], "the scaler's number would be overwritten"
        elif kind == "ServiceMonitor":
            headless = found.objects["Service", f"{NAME}-headless"]
            assert spec["selector"]["matchLabels"].items() <= headless["metadata"]["labels"].items()
            named = {port["name"] for port in headless["spec"]["ports"]}
            assert {each["port"] for each in spec["endpoints"]} <= named


def test_certificate_names_both_services_and_fills_the_mounted_secret() -> None:
    found = release("cpu", "full")
    spec = found.objects["Certificate", NAME]["spec"]
    assert {NAME, f"{NAME}-headless", "npugrad.example"} <= set(spec["dnsNames"])
    secrets = {volume.get("secret", {}).get("secretName") for volume in found.pod["volumes"]}
    assert spec["secretName"] in secrets


@every_release
def test_services_are_one_address_and_every_address(found: Release) -> None:
    cluster, headless = (found.objects["Service", f"{NAME}{end}"]["spec"] for end in ("", "-headless"))
    assert (cluster["type"], cluster.get("clusterIP")) == ("ClusterIP", None)
    assert headless["clusterIP"] == "None"
    assert "metrics" in {port["name"] for port in headless["ports"]}


def test_profiles_cannot_run_side_by_side() -> None:
    """One Service must never mix results of an NPU with results of a CPU."""
    npu, cpu = (release(name).deployment["spec"]["selector"] for name in ("mindcluster", "cpu"))
    # A selector cannot be changed: with another one, an upgrade from one to the other would fail.
    assert npu == cpu


def test_image_says_its_version_and_chip() -> None:
    for profile in PROFILES:
        image = release(profile).server["image"]
        version, _, kind = image.partition(":")[2].partition("-")
        assert version == chart().metadata["appVersion"]
        assert kind == ("cpu" if profile == "cpu" else "910b-ubuntu22.04"), "an image works on one chip only"
