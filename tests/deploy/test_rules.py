"""Metrics, recording rules, alerts and dashboard: what promtool says, and that what they name exists."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.prometheus_tools import program
from tests.deploy.releases import CHART, ROOT, render, values_of
from tests.fix_server import run_server
from tests.fix_tls import Certificates

from npugrad._tools.metrics_table import all_metrics

RULES = CHART / "files" / "npugrad.rules.yaml"
TESTS = ROOT / "tests" / "deploy" / "npugrad.rules.test.yaml"
_TOOL_S = 60


def rules() -> list[dict[str, Any]]:
    """Return every rule."""
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def _promtool(*arguments: object) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_TOOL_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    assert f"{len(rules())} rules found" in _promtool("check", "rules", RULES)


def test_every_alert_fires_and_resolves_as_its_test_says() -> None:
    assert "SUCCESS" in _promtool("test", "rules", TESTS)


def test_joins_that_are_tested_are_those_of_the_page() -> None:
    page = " ".join((ROOT / "docs/guides/operating.md").read_text("utf-8").split())
    groups = yaml.safe_load(TESTS.read_text("utf-8"))["tests"]
    joins = [case["expr"] for group in groups for case in group.get("promql_expr_test", ())]
    assert sum("npu_chip_info" in expr for expr in joins) == 3
    assert all(" ".join(expr.split()) in page for expr in joins if "npu_chip_info" in expr)


@pytest.mark.parametrize("alert", ALERTS)
def test_no_alert_is_without_a_test_of_firing_and_resolving(alert: str) -> None:
    cases = [
        (str(case["eval_time"]), bool(case["exp_alerts"]))
        for group in yaml.safe_load(TESTS.read_text("utf-8"))["tests"]
        for case in group.get("alert_rule_test", ())
        if case["alertname"] == alert
    ]
    fires = [firing for _, firing in cases]
    assert fires[0] is False, "before"
    assert True in fires
    assert fires[-1] is False, "after"


@pytest.fixture(scope="module")
def page(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a server with TLS."""
    flags = "--metrics-listen", "127.0.0.1:0", *certificates.flags
    log = tmp_path_factory.mktemp("page") / "server.log"
    with run_server(log, *flags, credentials=certificates.credentials()) as running:
        status, text = running.page("/metrics")
    assert status == 200
    return text


def test_table_of_metrics_has_those_of_the_page_and_no_others(page: str) -> None:
    reference = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    table = reference.partition("<!-- generated: metrics -->")[2].partition("<!-- end of metrics -->")[0]
    shown = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
    named = {(name, kind) for name, kind in shown if not name.endswith("_created")}
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE)) == named


def test_table_of_metrics_names_the_labels_of_the_page(page: str) -> None:
    labels = {row.name: set(row.labels) for row in all_metrics()}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if not name.endswith("_created"):
                assert sample.labels.keys() - {"le"} == labels[name], sample


def test_what_the_rules_ask_for_is_on_the_page(page: str) -> None:
    known = {family.name for family in text_string_to_metric_families(page)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        names = set(re.findall(r"\b[a-z]*:?npugrad_[a-z0-9_]+(?::[a-z0-9_]+)?", rule["expr"]))
        assert names
        plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names - recorded}
        assert plain <= known, rule


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_its_paragraph_in_the_runbook(alert: str) -> None:
    page, _, anchor = ALERTS[alert]["annotations"]["runbook_url"].partition("#")
    assert anchor == alert.lower()
    assert f"\n### {alert}\n" in (ROOT / page).read_text("utf-8")


def test_the_chart_brings_the_same_rules() -> None:
    values = values_of(
        "mindcluster", {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}
    )
    (found,) = (made for (kind, _), made in render(values).items() if kind == "PrometheusRule")
    assert found["spec"] == yaml.safe_load(RULES.read_text("utf-8"))
    assert found["metadata"]["labels"]["release"] == "prometheus"
    elsewhere = {"prometheusRule": {"enabled": True, "runbook": "https://wiki.example/npugrad"}}
    (moved,) = (
        made for (kind, _), made in render(values_of("cpu", elsewhere)).items() if kind == "PrometheusRule"
    )
    links = {
        rule["annotations"]["runbook_url"].partition("#")[0]
        for group in moved["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert links == {"https://wiki.example/npugrad"}
