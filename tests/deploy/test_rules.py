"""Metrics, recording rules, alerts and dashboard: what promtool says, and that what they name exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.prometheus_tools import program
from tests.deploy.releases import Release
from tests.fix_server import run_quick_server
from tests.fix_tls import Certificates

from npugrad._tools.gen_manifests import CHART, ROOT
from npugrad._tools.metrics_table import all_metrics

RULES = CHART / "files" / "npugrad.rules.yaml"
# As text: to YAML, 0x20 is a number, and to promtool twenty more zeros.
CASES = yaml.load(
    Path(__file__).with_name("npugrad.rules.test.yaml").read_text("utf-8"), Loader=yaml.CBaseLoader
)
_TOOL_S = 60


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def _promtool(*arguments: object) -> str:
    command = [str(each) for each in (program("promtool"), *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _case_of_promtool(case: dict[str, Any]) -> dict[str, Any]:
    """A case of ours as promtool has it."""
    alerts = []
    for alert in case.get("alerts", ()):
        name, link = alert["alert"], f"docs/guides/operating.md#{alert['alert'].lower()}"
        for time, fires in alert["fires"].items():
            told = {"summary": alert.get("summary"), "runbook": link}
            firing = [{"exp_labels": alert["labels"], "exp_annotations": told}] if fires == "true" else []
            alerts.append({"alertname": name, "eval_time": time, "exp_alerts": firing})
    expressions = [
        {
            "expr": each["expr"],
            "eval_time": each["at"],
            "exp_samples": [{"labels": each["labels"], "value": float(each["value"])}],
        }
        for each in case.get("expressions", ())
    ]
    return {
        "name": case["name"],
        "interval": case.get("interval", "1m"),
        "input_series": [{"series": name, "values": values} for name, values in case["series"].items()],
        "alert_rule_test": alerts,
        "promql_expr_test": expressions,
    }


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    assert f"{len(rules())} rules found" in _promtool("check", "rules", RULES)


def test_every_alert_fires_and_resolves_as_its_test_says(tmp_path: Path) -> None:
    tests = [_case_of_promtool(case) for case in CASES]
    made = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(json.dumps(made))
    assert "SUCCESS" in _promtool("test", "rules", tmp_path / "tests.yaml")


def test_joins_that_are_tested_are_those_of_the_page() -> None:
    page = "".join((ROOT / "docs/guides/operating.md").read_text("utf-8").split())
    joins = [each["expr"] for case in CASES for each in case.get("expressions", ())]
    assert sum("npu_chip_info" in expr for expr in joins) == 3
    assert all("".join(expr.split()) in page for expr in joins if "npu_chip_info" in expr)


def test_every_alert_has_a_test_of_firing_and_resolving_and_a_paragraph_in_the_runbook() -> None:
    for name, rule in ALERTS.items():
        tested = (alert for case in CASES for alert in case.get("alerts", ()) if alert["alert"] == name)
        fires = [firing for alert in tested for firing in alert["fires"].values()]
        assert (fires[0], "true" in fires, fires[-1]) == ("false", True, "false"), name
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == name.lower()
        assert f"\n### {name}\n" in (ROOT / page).read_text("utf-8")


@pytest.fixture(scope="module")
def page(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> str:
    flags = "--metrics-listen", "127.0.0.1:0", *certificates.flags
    log = tmp_path_factory.mktemp("page") / "server.log"
    with run_quick_server(log, *flags, credentials=certificates.credentials()) as running:
        status, text = running.page("/metrics")
    assert status == 200
    return text


def test_table_of_metrics_has_those_of_the_page_with_their_labels_and_no_others(page: str) -> None:
    reference = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    table = reference.partition("<!-- generated: metrics -->")[2].partition("<!-- end of metrics -->")[0]
    shown = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE)
    assert set(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE)) == set(shown)
    labels = {row.name: set(row.labels) for row in all_metrics()}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels[name], sample


def test_what_the_rules_ask_for_is_on_the_page(page: str) -> None:
    known = {family.name for family in text_string_to_metric_families(page)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        names = set(re.findall(r"\b[a-z]*:?npugrad_[a-z0-9_]+(?::[a-z0-9_]+)?", rule["expr"]))
        assert names
        plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names - recorded}
        assert plain <= known, rule


def test_the_chart_brings_the_same_rules() -> None:
    def rule_of(profile: str, **values: object) -> dict[str, Any]:
        objects = Release(profile, {"prometheusRule": {"enabled": True, **values}}).objects
        (found,) = (made for (kind, _), made in objects.items() if kind == "PrometheusRule")
        return found

    found = rule_of("mindcluster", labels={"release": "prometheus"})
    assert found["spec"] == yaml.safe_load(RULES.read_text("utf-8"))
    assert found["metadata"]["labels"]["release"] == "prometheus"
    moved = rule_of("cpu", runbook="https://wiki.example/npugrad")["spec"]["groups"]
    alerts = [rule for group in moved for rule in group["rules"] if "alert" in rule]
    links = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in alerts}
    assert links == {"https://wiki.example/npugrad"}
