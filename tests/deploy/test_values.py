"""Values of the chart: what its schema and templates refuse; all others render what a cluster takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helm_python import HelmRenderError, HelmValuesError
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator
from tests.deploy.releases import MUTUAL, TENANTS, Release, chart
from tests.deploy.schemas import KUBERNETES, check

from npugrad._tools.gen_manifests import CHART, PROFILES, laid_on

Schema = dict[str, Any]

SCHEMA: Schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
_TEXTS = (
    "",
    "a",
    "npugrad-1",
    "NPU_x.y",
    "null",
    "007",
    "1.5",
    "10.0.0.0/8",
    "*.gradients.example",
    "huawei.com/Ascend910",
    "localhost:5000/team/npugrad",
    "a-name-of-sixty-three-characters-which-is-what-labels-may-have",
    "https://prometheus:9090/?a=b#c",
    "15s",
    "2160h30m",
    "750m",
    "30%",
    "--log-level=debug",
    "  two words: 'quoted', \"twice\", {{ braced }} # and more ",
    TENANTS,
)
"""For every pattern of the schema there are some that fit."""
_WIDEST = 50
"""Numbers without a maximum go so far above their minimum."""


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicas": 0}, "/replicas"),
        ({"replica": 2}, "'replica' not allowed"),
        ({"devices": {"resource": "nvidia.com/gpu"}}, "/devices/resource"),
        ({"extraArgs": ["log-level=debug"]}, "/extraArgs/0"),
        ({"podLabels": {"team": "computer vision"}}, "/podLabels/team"),
        ({"podLabels": {"app.kubernetes.io/component": "mine"}}, "invalid propertyName"),
        ({"tolerations": [{"key": "npu", "effect": "NoScheduling"}]}, "/tolerations/0/effect"),
    ],
)
def test_schema_refuses_what_is_no_value(values: dict[str, Any], told: str) -> None:
    with pytest.raises(HelmValuesError, match=re.escape(told)):
        Release("mindcluster", values)


@pytest.mark.parametrize(
    ("profile", "values", "told"),
    [
        ("cpu", {"memory": {"limitGiB": 5}}, "memory.limitGiB: found 5; expected at least 6"),
        (
            "mindcluster",
            {"devices": {"count": 8}, "memory": {"limitGiB": 20}},
            "found 20; expected at least 48",
        ),
        ("cpu", {"insecure": True}, "insecure: found true with tls.enabled: true"),
        ("cpu", {"tls": {"enabled": False}}, "tls.enabled: found false; expected true, or insecure: true"),
        (
            "cpu",
            {"tls": {"enabled": False, "certificate": {"create": True}}, "insecure": True},
            "expected TLS to be on",
        ),
        ("cpu", {"tls": {"certificate": {"create": True}}}, "tls.certificate.issuer.name: found none"),
        ("cpu", {"tls": {"mutual": True}}, "tls.mutual: found true without"),
        ("cpu", {"loadTest": {"enabled": True}}, "loadTest.image: found none"),
        (
            "cpu",
            {**MUTUAL, "loadTest": {"enabled": True, "image": "bench"}},
            "loadTest.clientSecretName: found none",
        ),
        ("cpu", {"grpcRoute": {"enabled": True}}, "grpcRoute.parentRefs: found none"),
        ("dra", {"volcano": {"enabled": True}}, "volcano.enabled: found true with dra.enabled"),
        (
            "cpu",
            {"tenants": {"configMapName": "tenants"}},
            "tls.mutual: found false with tenants; expected true",
        ),
        (
            "cpu",
            {**MUTUAL, "tenants": {"file": TENANTS, "secretName": "tenants"}},
            "tenants: found more than one of file, configMapName and secretName",
        ),
        ("cpu", {"extraArgs": ["--tenants=/tmp/mine.toml"]}, "extraArgs: found --tenants"),
        ("mindcluster", {"devices": {"resource": ""}}, "devices.resource: found none"),
        ("mindcluster", {"dra": {"enabled": True}}, "dra.enabled: found true"),
        ("cpu", {"volcano": {"enabled": True}}, "devices.kind: found cpu"),
        ("cpu", {"product": "auto"}, "product: found auto with devices.kind: cpu"),
        ("hami", {"timing": {"livenessDownLimit": 500}}, "found 500; expected more than 545"),
        ("cpu", {"service": {"metricsPort": 50051}}, "service.metricsPort: found 50051, which is grpcPort"),
        ("hami", {"autoscaling": {"minReplicas": 9}}, "found 4; expected at least minReplicas, 9"),
        ("cpu", {"resources": {"homeGiB": 7}}, "resources.ephemeralStorageGiB: found 2"),
        ("cpu", {"extraArgs": ["--listen=0.0.0.0:1"]}, "extraArgs: found --listen"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    profile: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(told)):
        Release(profile, values)


# -------------------------------------------------------------------------- values made by the schema


def _resolved(schema: Schema) -> Schema:
    """The schema itself, or the one that it refers to."""
    if reference := schema.get("$ref"):
        found: Schema = SCHEMA["definitions"][reference.rpartition("/")[2]]
        return found
    return schema


def _texts(schema: Schema) -> st.SearchStrategy[str]:
    """Some of those texts that fit."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", 1000)
    pattern = re.compile(schema.get("pattern", ""))
    fitting = [text for text in _TEXTS if least <= len(text) <= most and pattern.search(text)]
    return st.sampled_from([text for text in fitting if text not in schema.get("not", {}).get("enum", ())])


def _objects(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    properties = {name: _made(each) for name, each in schema.get("properties", {}).items()}
    if properties:
        least = list(properties)[: schema.get("minProperties", 0)]
        required = {name: properties.pop(name) for name in schema.get("required", least)}
        return st.fixed_dictionaries(required, optional=properties)
    if isinstance(values := schema.get("additionalProperties"), dict):
        return st.dictionaries(_texts(schema["propertyNames"]), _made(values), max_size=2)
    return st.just({})  # what Kubernetes alone can judge


def _made(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that a part of the schema allows."""
    schema = _resolved(schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of(*map(_made, schema["anyOf"]))
    least, most = schema.get("minimum", 0), schema.get("maximum")
    made: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
        "string": lambda: _texts(schema),
        "integer": lambda: st.integers(least, least + _WIDEST if most is None else most),
        "number": lambda: st.integers(1, 400).map(lambda parts: parts / 4),
        "boolean": st.booleans,
        "array": lambda: st.lists(_made(schema["items"]), max_size=2),
        "object": lambda: _objects(schema),
    }
    return made[schema["type"]]()


def _agreeing(values: dict[str, Any]) -> dict[str, Any]:
    """The values without contradictions, which templates refuse; the profile adds what is missing."""
    for alone in ("product", "dra", "volcano", "global", "extraEnv"):
        values.pop(alone, None)
    for name, alone in (("devices", "kind"), ("devices", "resource"), ("memory", "limitGiB")):
        values.get(name, {}).pop(alone, None)
    _agree_on_callers(values)
    resources = values.get("resources", {})
    scratch = resources.setdefault("homeGiB", 1) + resources.setdefault("tmpGiB", 1)
    resources["ephemeralStorageGiB"] = resources.get("ephemeralStorageGiB", 0.25) + scratch
    timing = values.setdefault("timing", {})
    longest_start = 3 * timing.setdefault("workerStartTimeout", 30) + 5
    timing["livenessDownLimit"] = longest_start + timing.get("livenessDownLimit", 1)
    scaling, service = values.get("autoscaling", {}), values.get("service", {})
    scaling["maxReplicas"] = scaling.setdefault("minReplicas", 1) + scaling.get("maxReplicas", 1)
    if service.get("grpcPort", 50051) == service.get("metricsPort", 9464):
        service.pop("grpcPort", None)
    if "extraArgs" in values:
        values["extraArgs"] = ["--log-level=debug"] * bool(values["extraArgs"])
    return {**values, "resources": resources, "autoscaling": scaling}


def _agree_on_callers(values: dict[str, Any]) -> None:
    tls = values.setdefault("tls", {})
    values["insecure"] = not tls.setdefault("enabled", True)
    certificate = tls.get("certificate", {})
    tls["mutual"] = tls["enabled"] and tls.get("mutual", False)
    tls["clientCaSecretName"] = tls.get("clientCaSecretName") or "callers"
    if certificate.get("create"):
        certificate["create"] = tls["enabled"]
        issuer = certificate.setdefault("issuer", {})
        issuer["name"] = issuer.get("name") or "internal"
    load_test = values.setdefault("loadTest", {})
    for name in ("image", "clientSecretName"):
        load_test[name] = load_test.get(name) or "load-test"
    route = values.get("grpcRoute", {})
    route["enabled"] = bool(route.get("enabled") and route.get("parentRefs"))
    values["grpcRoute"] = route
    sources = {name: text for name, text in values.pop("tenants", {}).items() if text and tls["mutual"]}
    values["tenants"] = dict(list(sources.items())[:1])


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 2)
@given(profile=st.sampled_from(PROFILES), values=_made(SCHEMA))
def test_generated_values_render_what_the_schemas_allow(profile: str, values: dict[str, Any]) -> None:
    """A release of these values is what a cluster takes, and its server has time to end."""
    found = Release(profile, _agreeing(values))
    check(found.objects, KUBERNETES[-1])
    made = found.settings
    assert found.pod["terminationGracePeriodSeconds"] > made.drain_delay_s + made.drain_timeout_s


# ------------------------------------------------------------------------ values that are wrong somewhere


def _wrong(schema: Schema) -> Iterator[Any]:
    """Values that a part of the schema does not allow, one of each kind, where it allows some but not all."""
    schema = _resolved(schema)
    if "anyOf" in schema:
        yield from ([], {}, True)
        return
    if "enum" in schema:
        yield from ("none of them", 7)
        return
    yield {"string": 7, "object": [], "array": {"a": 1}}.get(schema["type"], "some text")
    if "pattern" in schema:
        yield "~ \n ~"
    if schema.get("minLength"):
        yield ""
    if "not" in schema:
        yield schema["not"]["enum"][0]
    if "maxLength" in schema:
        yield "a" * (schema["maxLength"] + 1)
    if (least := schema.get("minimum", schema.get("exclusiveMinimum"))) is not None:
        yield least - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    if schema["type"] == "integer":
        yield 1.5
    if schema.get("additionalProperties") is False:
        yield {"unknown": 1}


def _all_wrong(schema: Schema) -> Iterator[Any]:
    """Values of a part of the schema, each wrong at one place of it or of what is in it."""
    schema = _resolved(schema)
    yield from _wrong(schema)
    for name, part in schema.get("properties", {}).items():
        for wrong in _all_wrong(part):
            yield {name: wrong}
    if isinstance(part := schema.get("additionalProperties"), dict):
        for wrong in _all_wrong(part):
            yield {"key": wrong}
    if "items" in schema:
        for wrong in _all_wrong(schema["items"]):
            yield [wrong]
    if "propertyNames" in schema:
        yield {"no key": "text"}
        yield from ({name: "text"} for name in schema["propertyNames"].get("not", {}).get("enum", ()))


def test_schema_refuses_each_value_that_is_wrong_at_one_place() -> None:
    """By another validator than Helm's, which is slow; that Helm's sees the schema is shown above."""
    Draft7Validator.check_schema(SCHEMA)
    own, count = chart().merge_values({}), 0
    for name, part in SCHEMA["properties"].items():
        validator = Draft7Validator({**part, "definitions": SCHEMA["definitions"]})
        assert name not in own or validator.is_valid(own[name])
        for wrong in _all_wrong(part):
            assert not validator.is_valid(laid_on(own, {name: wrong})[name]), (name, wrong)
            count += 1
    assert count > 200
