"""What a cluster takes: strict schemas of Kubernetes' own objects and of the custom ones in the chart.

Those of Kubernetes come from `kubernetes-validate`. Those of the custom ones are written here, from the
definitions that their projects publish, each named below: the fields that the chart uses and some beside
them, with types, limits and what is required. A field that is not listed is refused. What a webhook or a
CEL rule checks beyond that, no schema shows.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from packaging.version import Version
from referencing import Registry, Resource
from tests.deploy.releases import Documents

Schema = dict[str, Any]

OLDEST_KUBERNETES = Version("1.30")
KUBERNETES = sorted(
    {major_minor(version) for version in all_versions() if Version(version) >= OLDEST_KUBERNETES}, key=Version
)
"""Versions with a schema, the oldest that the chart allows first."""

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 253}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_LABEL = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PROMETHEUS_TIME: Schema = {
    "type": "string",
    "pattern": r"^(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$",
}
_GO_TIME: Schema = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(h|m|s|ms|us|ns))+$"}


def _object(*required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _list(items: Schema, least: int = 0, most: int = 1000) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_METADATA = _object(
    "name",
    name={"type": "string", "maxLength": 253, "pattern": f"^{_DNS}$"},
    namespace=_NAME,
    labels={
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 63, "pattern": _LABEL},
    },
    annotations=_TEXTS,
)
_SELECTOR = _object(matchLabels=_TEXTS)

# github.com/prometheus-operator/prometheus-operator, example/prometheus-operator-crd
_SERVICE_MONITOR = _object(
    "endpoints",
    "selector",
    endpoints=_list(
        _object(port=_TEXT, path=_TEXT, interval=_PROMETHEUS_TIME, scrapeTimeout=_PROMETHEUS_TIME)
    ),
    selector=_SELECTOR,
    namespaceSelector=_object(any={"type": "boolean"}, matchNames=_list(_TEXT)),
)
_RULE = _object(
    "expr",
    record=_TEXT,
    alert=_TEXT,
    expr={"type": ["string", "integer"]},
    labels=_TEXTS,
    annotations=_TEXTS,
    **{"for": _PROMETHEUS_TIME, "keep_firing_for": _PROMETHEUS_TIME},
)
_PROMETHEUS_RULE = _object(
    groups=_list(_object("name", name=_NAME, interval=_PROMETHEUS_TIME, rules=_list(_RULE)))
)

# github.com/kedacore/keda, config/crd/bases
_SCALING_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600}, selectPolicy=_TEXT
)
_SCALED_OBJECT = _object(
    "scaleTargetRef",
    "triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_NAME),
    minReplicaCount=_COUNT,
    maxReplicaCount={"type": "integer", "minimum": 1},
    cooldownPeriod=_COUNT,
    pollingInterval={"type": "integer", "minimum": 1},
    advanced=_object(
        restoreToOriginalReplicaCount={"type": "boolean"},
        horizontalPodAutoscalerConfig=_object(
            name=_TEXT, behavior=_object(scaleDown=_SCALING_RULES, scaleUp=_SCALING_RULES)
        ),
    ),
    triggers=_list(
        _object("type", "metadata", type=_NAME, name=_TEXT, metricType=_TEXT, metadata=_TEXTS), least=1
    ),
)

# github.com/cert-manager/cert-manager, deploy/crds; that times are Go's is said there in words.
_CERTIFICATE = _object(
    "issuerRef",
    "secretName",
    secretName=_TEXT,
    duration=_GO_TIME,
    renewBefore=_GO_TIME,
    dnsNames=_list(_TEXT),
    usages=_list({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
    issuerRef=_object("name", group=_TEXT, kind=_TEXT, name=_TEXT),
    privateKey=_object(
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        encoding={"enum": ["PKCS1", "PKCS8"]},
        rotationPolicy={"enum": ["Never", "Always"]},
        size={"type": "integer"},
    ),
)

# github.com/kubernetes-sigs/gateway-api, config/crd/standard
_GROUP: Schema = {"type": "string", "maxLength": 253, "pattern": f"^$|^{_DNS}$"}
_KIND: Schema = {"type": "string", "maxLength": 63, "pattern": r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"}
_NAMESPACE: Schema = {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_REFERENCE = {"group": _GROUP, "kind": _KIND, "namespace": _NAMESPACE, "name": _NAME, "port": _PORT}
_GRPC_ROUTE = _object(
    parentRefs=_list(
        _object(
            "name", sectionName={"type": "string", "maxLength": 253, "pattern": f"^{_DNS}$"}, **_REFERENCE
        ),
        most=32,
    ),
    hostnames=_list({"type": "string", "maxLength": 253, "pattern": rf"^(\*\.)?{_DNS}$"}, most=16),
    rules=_list(
        _object(backendRefs=_list(_object("name", weight=_COUNT, **_REFERENCE), most=16)), least=1, most=16
    ),
)

_CUSTOM = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _GRPC_ROUTE,
}
CUSTOM_KINDS = {kind for _, kind in _CUSTOM}
"""Kinds that Kubernetes itself does not know."""


def check(release: Documents, version: str) -> None:
    """Checks every object of a release.

    Args:
        release: The objects.
        version: Of Kubernetes, such as ``"1.30"``.

    Raises:
        ValidationError: One of them is not what the schema says, or has a field that it does not know.
    """
    for document in release.values():
        _validator(document["apiVersion"], document["kind"], version).validate(document)


@cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    if custom := _CUSTOM.get((api_version, kind)):
        metadata = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": _METADATA}
        return Draft202012Validator(_object("metadata", "spec", spec=custom, **metadata))
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    try:
        schema = schema_contents(f"{folder}/{kind.lower()}-{short}.json", version)
    except FileNotFoundError:
        raise ValidationError(f"found {api_version} {kind}, unknown to Kubernetes {version}") from None
    return Draft202012Validator(schema, registry=_definitions(folder, version))


@cache
def _definitions(folder: str, version: str) -> Registry[Any]:
    found: Resource[Any] = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    made: Registry[Any] = found @ Registry()
    return made
