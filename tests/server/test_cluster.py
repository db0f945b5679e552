from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from npugrad_server.cli import app
from npugrad_server.cluster import (
    ClusterError,
    PodRequest,
    ask_cluster,
    check_cluster,
    fitting_profile,
    read_cluster,
)

ASCEND, CCE, HAMI = "huawei.com/Ascend910", "huawei.com/ascend-1980", "huawei.com/Ascend910B3"


def node(name: str = "node-1", **changes: Any) -> dict[str, Any]:
    """A healthy A2 node of MindCluster with eight cards, or with changes."""
    facts = {
        "cards": {ASCEND: "8"},
        "labels": {"accelerator-type": "module-910b-8"},
        "spec": {},
        "cpu": "191",
        "memory": "760Gi",
        "ready": "True",
        "architecture": "arm64",
        "version": "v1.34.1",
    } | changes
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": facts["labels"]},
        "spec": facts["spec"],
        "status": {
            "allocatable": {"cpu": facts["cpu"], "memory": facts["memory"], **facts["cards"]},
            "conditions": [{"type": "Ready", "status": facts["ready"]}],
            "nodeInfo": {"architecture": facts["architecture"], "kubeletVersion": facts["version"]},
        },
    }


def pod(on: str = "node-1", phase: str = "Running", **requests: str) -> dict[str, Any]:
    """A pod on a node, with what it asks for; ``cards`` are whole ones of MindCluster."""
    named = {ASCEND if what == "cards" else what: amount for what, amount in requests.items()}
    container = {"resources": {"requests": named}}
    return {
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": phase},
    }


def text_of(*items: dict[str, Any]) -> str:
    """As kubectl prints them."""
    return json.dumps({"kind": "List", "items": items})


def reasons(*items: dict[str, Any], profile: str = "", request: PodRequest | None = None) -> list[str]:
    cluster = read_cluster(text_of(*items))
    found = check_cluster(cluster, profile or fitting_profile(cluster), request or PodRequest())
    assert all(each.cure for each in found if each.label != "ok")
    return [each.reason for each in found if each.reason]


RUNTIME = {"kind": "RuntimeClass", "metadata": {"name": "ascend"}}
CPU_NODE = node(cards={}, labels={})
HOST, OLD_HOST = node("host", cards={}, labels={}), node("host", cards={}, version="v1.29.14")
TAINT = {"taints": [{"key": "team", "effect": "NoSchedule"}]}


@pytest.mark.parametrize(
    ("items", "profile"),
    [
        ([node()], "mindcluster"),
        ([node(cards={HAMI: "4", f"{HAMI}-memory": "262144"}, labels={"ascend": "on"})], "hami"),
        ([node(cards={"huawei.com/Ascend910A": "8"}, labels={})], "hami"),
        ([node(cards={CCE: "8"}, labels={})], "cce"),
        ([CPU_NODE], "cpu"),
        ([CPU_NODE, node("node-2")], "mindcluster"),
    ],
)
def test_profile_follows_from_the_names_of_the_cards(items: list[dict[str, Any]], profile: str) -> None:
    assert fitting_profile(read_cluster(text_of(*items))) == profile


HAMI_NODE = node(cards={HAMI: "4"})
MANY, AMD = PodRequest(cards=8), PodRequest(architecture="amd64")


@pytest.mark.parametrize(
    ("items", "profile", "problems"),
    [
        ([node()], "mindcluster", ""),
        ([node()], "mindcluster-volcano", ""),
        ([HAMI_NODE, RUNTIME], "hami", ""),
        ([node(cards={CCE: "8"}, labels={})], "cce", ""),
        ([node(cards={})], "dra", ""),
        ([CPU_NODE], "cpu", ""),
        ([node(), pod(cards="7")], "mindcluster", ""),
        ([node(), pod(cards="8", phase="Succeeded")], "mindcluster", ""),
        ([node(), pod("node-2", cards="8")], "mindcluster", ""),
        ([node(spec={"taints": [{"key": ASCEND, "effect": "NoSchedule"}]})], "mindcluster", ""),
        ([node(spec={"taints": [{"key": "team", "effect": "PreferNoSchedule"}]})], "mindcluster", ""),
        ([node(version="v1.30.0+r1")], "mindcluster", ""),
        ([node(cards={CCE: "8"})], "mindcluster", "OTHER_RESOURCE"),
        ([node()], "hami", "OTHER_RESOURCE"),
        ([CPU_NODE], "mindcluster", "NO_CARD"),
        ([node(cards={ASCEND: "0"})], "mindcluster", "NO_HEALTHY_CARD"),
        ([node(), pod(cards="8")], "mindcluster", "NO_FREE_CARD"),
        ([node(), pod(cards="4"), pod(cards="4")], "mindcluster", "NO_FREE_CARD"),
        ([node(cards={f"{ASCEND}-4c": "8"})], "mindcluster", "SLICED_CARD"),
        ([node(cards={"huawei.com/Ascend310P": "8"})], "mindcluster", "OTHER_CHIP"),
        ([node(cards={"huawei.com/Ascend310": "8"})], "mindcluster", "OTHER_CHIP"),
        ([node(cards={"huawei.com/npu": "8"})], "mindcluster", "OTHER_CHIP"),
        ([node(labels={"accelerator-type": "module-a3-16"})], "mindcluster", "OTHER_CHIP"),
        ([node(labels={"accelerator-type": "module-910-8"})], "mindcluster", "OTHER_CHIP"),
        ([node(cards={"huawei.com/Ascend910A": "8"}, labels={})], "hami", "OTHER_CHIP"),
        ([node(spec=TAINT)], "mindcluster", "TAINTED"),
        ([node(spec={"unschedulable": True})], "mindcluster", "CORDONED"),
        ([node(ready="False")], "mindcluster", "NODE_NOT_READY"),
        ([node(ready="Unknown")], "mindcluster", "NODE_NOT_READY"),
        ([node(version="v1.29.14")], "mindcluster", "KUBERNETES_TOO_OLD"),
        ([node(version="")], "mindcluster", "KUBERNETES_TOO_OLD"),
        ([node(cards={}, version="v1.33.0")], "dra", "KUBERNETES_TOO_OLD"),
        ([node(cpu="4")], "mindcluster", "NO_FREE_CPU"),
        ([node(), pod(cpu="190000m")], "mindcluster", "NO_FREE_CPU"),
        ([node(memory="16Gi")], "mindcluster", "NO_FREE_MEMORY"),
        ([node(ready="False", spec=TAINT)], "mindcluster", "NODE_NOT_READY TAINTED"),
    ],
)
def test_each_problem_has_its_reason(items: list[dict[str, Any]], profile: str, problems: str) -> None:
    assert reasons(*items, profile=profile) == [*problems.split(), *(["NO_NODE"] if problems else [])]


def test_what_only_some_clusters_or_images_tell_is_compared_where_it_is_told() -> None:
    other = {"kind": "RuntimeClass", "metadata": {"name": "kata"}}
    assert reasons(HAMI_NODE, other) == ["NO_RUNTIME_CLASS"]
    assert reasons(HAMI_NODE) == []
    assert reasons(node(cards={ASCEND: "4"}), request=MANY) == ["TOO_FEW_CARDS", "NO_NODE"]
    assert reasons(node(), request=AMD) == ["OTHER_ARCHITECTURE", "NO_NODE"]


def test_problems_of_one_node_are_notes_while_another_can_take_the_pod() -> None:
    cluster = read_cluster(text_of(node("good"), node("bad", spec=TAINT), CPU_NODE))
    found = check_cluster(cluster, "mindcluster", PodRequest())
    assert [(each.label, each.reason) for each in found] == [("note", "TAINTED"), ("ok", "")]
    assert "1 of 3 nodes" in found[-1].text
    assert "good" in found[-1].text


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "found nothing"),
        (" \n", "found nothing"),
        ("error: no context", "found no JSON"),
        (text_of(node())[:-20], "found JSON that is cut off"),
        ("[]", "found JSON that is not a list of nodes"),
        ('{"kind": "Deployment"}', "found JSON that is not a list of nodes"),
        ('{"items": [1]}', "found JSON that is not a list of nodes"),
        (text_of(), "found no nodes"),
        (text_of(pod()), "found no nodes"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, told: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(told)):
        read_cluster(text)


@pytest.mark.parametrize(
    ("quantities", "found"),
    [
        ("1T 2Pi 1e12 21474836480 20Gi .5E", []),
        ("20000000000u 19.5Gi", ["NO_FREE_MEMORY", "NO_NODE"]),
        ("+1.5E3Gi lots", None),
    ],
)
def test_quantities_are_those_of_kubernetes(quantities: str, found: list[str] | None) -> None:
    for quantity in quantities.split():
        if found is None:
            with pytest.raises(ClusterError, match=rf"found the quantity .*{re.escape(quantity)}"):
                reasons(node(memory=quantity))
        else:
            assert reasons(node(memory=quantity)) == found, quantity


def test_single_node_and_a_list_of_nodes_without_kinds_are_read() -> None:
    alone = node()
    assert read_cluster(json.dumps(alone)).nodes == [alone]
    listed = {"kind": "NodeList", "items": [{k: v for k, v in alone.items() if k != "kind"}]}
    assert len(read_cluster(json.dumps(listed)).nodes) == 1


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_any_other_json_is_refused_and_nothing_worse(value: Any) -> None:
    with pytest.raises(ClusterError):
        read_cluster(json.dumps(value))


# ------------------------------------------------------------------------------ inside of a cluster


class ApiServer(BaseHTTPRequestHandler):
    """Answers as the API server does: lists whose items have no kind, and only with the right token."""

    def do_GET(self) -> None:
        good = self.headers["Authorization"] == "Bearer secret"
        kind, items = {"/api/v1/nodes": ("NodeList", [node()])}.get(self.path, ("PodList", [pod(cards="8")]))
        bare = [{key: value for key, value in item.items() if key != "kind"} for item in items]
        body = json.dumps({"kind": kind, "items": bare}).encode()
        self.send_response(200 if good else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def api_server(tmp_path: Path) -> Iterator[str]:
    """Serve HTTPS on a free port, with a service account in the folder; return the address."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = HTTPServer(("127.0.0.1", 0), ApiServer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_api_server_is_asked_with_the_account_of_the_pod(api_server: str, tmp_path: Path) -> None:
    cluster = ask_cluster(api_server, tmp_path)
    found = check_cluster(cluster, "mindcluster", PodRequest())
    assert [each.reason for each in found] == ["NO_FREE_CARD", "NO_NODE"]
    assert cluster.runtime_classes is None
    (tmp_path / "token").write_text("another")
    with pytest.raises(ClusterError, match="403"):
        ask_cluster(api_server, tmp_path)


# ------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("arguments", "items", "code", "told"),
    [
        ([], [node()], 0, "ok    profile mindcluster: found 1 of 1 nodes that can take a pod: node-1"),
        (["--profile", "cce"], [node()], 1, "-> use the profile mindcluster, or set devices.resource"),
        (["--profile", "cce", "--resource", ASCEND], [node()], 0, "profile cce: found 1 of 1"),
        (["--profile", "cce"], [node()], 1, "-> the profile mindcluster would fit now, on node-1; or see"),
        ([], [node(), pod(cards="8"), HOST], 1, "-> the profile cpu would fit now, on node-1, host; or see"),
        ([], [node(), HOST], 0, f"take a pod: node-1; skipped, as they have no {ASCEND}: host"),
        ([], [node(), OLD_HOST], 0, "note host: found the kubelet v1.29.14; expected 1.30 or later"),
        (["--cards", "9"], [node()], 1, "lower devices.count"),
        (["--chip", "a3"], [node()], 1, "set image.chip to 910b"),
        ([], [], 2, "found no nodes"),
        (["--profile", "gke"], [node()], 2, "found 'gke'; expected one of mindcluster"),
    ],
)
def test_command_says_what_fits_and_how_to_mend_the_rest(
    arguments: list[str], items: list[dict[str, Any]], code: int, told: str
) -> None:
    result = CliRunner().invoke(app, ["preflight", "--nodes", "-", *arguments], input=text_of(*items))
    assert result.exit_code == code, result.output
    assert told in re.sub(r"[│\s]+", " ", result.output).replace("ok profile", "ok    profile")


def test_command_outside_of_a_cluster_asks_for_a_file() -> None:
    result = CliRunner().invoke(app, ["preflight"])
    assert result.exit_code == 2
    assert "expected a pod, or --nodes with a file or -" in result.output
