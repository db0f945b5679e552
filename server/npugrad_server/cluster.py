"""Checks whether a cluster's nodes offer what a release of the chart requests.

Reads the output of ``kubectl get nodes,pods,runtimeclasses -A -o json``, or the same from the API server
inside the cluster. Pods and runtime classes are optional; what only they tell is not checked without them.
Resource names are those of the vendor's device plugins, HAMi and Huawei Cloud CCE.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST_KUBERNETES, OLDEST_DRA = (1, 30), (1, 34)
MINDCLUSTER, CCE = "huawei.com/Ascend910", "huawei.com/ascend-1980"
PROFILES = ("mindcluster", "mindcluster-volcano", "hami", "cce", "dra", "cpu")
TOLERATED = frozenset({MINDCLUSTER, "huawei.com/Ascend310P", "huawei.com/npu"})
"""Taint keys that the chart tolerates."""
_HAMI = re.compile(r"huawei\.com/Ascend(910A|910B\d?|910C)")
_SLICE = re.compile(r"huawei\.com/Ascend\d+P?-\d+c.*")
_OTHER_CHIPS = {
    "huawei.com/Ascend310": "Atlas inference cards, which do not have the operators",
    "huawei.com/Ascend310P": "Atlas inference cards, which do not have the operators",
    "huawei.com/npu": "cards of the 950 generation, which npugrad does not support yet",
}
_CHIPS = (("910b", "910b"), ("a3", "a3"), ("910c", "a3"), ("910a", "910"), ("910", "910"))
"""Part of a label or resource name, and the chip as in image tags; the first match wins."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_UNITS = {
    unit: 1000.0**power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
}
_UNITS |= {f"{unit}i": 2.0 ** (10 * power) for power, unit in enumerate("KMGTPE", 1)}


Problem = tuple[str, str, str]
"""Reason, what was found and expected, and the cure."""


class ClusterError(ValueError):
    """The input does not describe a cluster; the message says what was found and expected."""


@dataclass(frozen=True)
class PodRequest:
    """What a pod of a release requests from its node.

    Attributes:
        cards: Number of cards.
        chip: Chip in the image's tag, such as ``"910b"``.
        architecture: Architecture of the image, such as ``"arm64"``; empty if it has both.
        cpus: Processor cores.
        memory_bytes: Its memory limit.
        runtime_class: Name of its runtime class; empty for the nodes' default.
    """

    cards: int = 1
    chip: str = "910b"
    architecture: str = ""
    cpus: float = 8.0
    memory_bytes: float = 20 * 2**30
    runtime_class: str = ""


def request_of(profile: str, cards: int, chip: str, architecture: str) -> PodRequest:
    """The request of a pod whose memory and processors are the chart's defaults."""
    if profile == "cpu":
        return PodRequest(cards, chip, architecture, cpus=4.0, memory_bytes=6 * 2**30)
    return PodRequest(cards, chip, architecture, memory_bytes=(16 + 4 * cards) * 2**30)


@dataclass(frozen=True)
class ClusterFinding:
    """The result of one check.

    Attributes:
        label: ``"ok"``; ``"note"``: it keeps pods off one node, but others can take them; ``"fail"``.
        reason: The kind of problem, as a stable name; empty if there is none.
        text: What was found, and where.
        cure: What to do about it; empty if there is no problem.
    """

    label: str
    reason: str
    text: str
    cure: str = ""


@dataclass(frozen=True)
class Cluster:
    """The parts of a cluster that are checked.

    Attributes:
        nodes: Node objects.
        pods: Pod objects; None if they were not read.
        runtime_classes: Names; None if they were not read.
    """

    nodes: list[dict[str, Any]]
    pods: list[dict[str, Any]] | None = None
    runtime_classes: frozenset[str] | None = None


def read_cluster(text: str) -> Cluster:
    """Parses the output of kubectl.

    Raises:
        ClusterError: It is empty, cut off, not JSON, JSON of something else, or without a node.
    """
    if not text.strip():
        raise ClusterError("found nothing; expected the output of kubectl get nodes -o json")
    try:
        document = json.loads(text)
    except ValueError as error:
        whole = "JSON that is cut off" if text.lstrip().startswith("{") else "no JSON"
        raise ClusterError(f"found {whole} ({error}); expected all of kubectl get nodes -o json") from None
    items = document.get("items") if isinstance(document, dict) else None
    if not isinstance(items, list) and isinstance(document, dict) and document.get("kind") == "Node":
        items = [document]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ClusterError(
            "found JSON that is not a list of nodes; expected the output of kubectl get nodes -o json"
        )
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    fallback = str(document.get("kind", "")).removesuffix("List")
    for item in items:
        by_kind[item.get("kind") or fallback].append(item)
    if not by_kind["Node"]:
        raise ClusterError("found no nodes; expected at least one: is the kubectl context correct?")
    classes = by_kind.get("RuntimeClass")
    return Cluster(
        by_kind["Node"],
        by_kind.get("Pod"),
        None if classes is None else frozenset(_name(each) for each in classes),
    )


def ask_cluster(server: str = "https://kubernetes.default.svc", account: Path = _ACCOUNT) -> Cluster:
    """Queries the API server, from a pod whose service account may list nodes and pods.

    Raises:
        ClusterError: This is not a pod, or the API server does not answer.
    """
    try:
        token = (account / "token").read_text("utf-8")
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError:
        raise ClusterError(
            f"found no service account in {account}; expected a pod, or --nodes with a file or -"
        ) from None
    found = [_get(f"{server}{path}", token, context) for path in ("/api/v1/nodes", "/api/v1/pods")]
    return Cluster(read_cluster(found[0]).nodes, json.loads(found[1]).get("items", []))


def _get(url: str, token: str, context: ssl.SSLContext) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as reply:
            return str(reply.read().decode())
    except OSError as error:
        raise ClusterError(f"{url}: found {error}; expected a list") from None


def fitting_profile(cluster: Cluster) -> str:
    """The chart's profile for the nodes' cards; ``"cpu"`` if they have none.

    Nodes do not show Volcano or dynamic resource allocation: `mindcluster-volcano` and `dra` are never
    returned.
    """
    resources = {resource for node in cluster.nodes for resource in _allocatable(node)}
    if any(map(_HAMI.fullmatch, resources)):
        return "hami"
    if CCE in resources:
        return "cce"
    return "mindcluster" if MINDCLUSTER in resources else "cpu"


def check_cluster(
    cluster: Cluster, profile: str, request: PodRequest, resource: str = ""
) -> list[ClusterFinding]:
    """Lists everything for and against running the server.

    Args:
        cluster: The cluster.
        profile: Name of the chart's profile.
        request: What a pod requests.
        resource: Resource name of the card on nodes; the profile's by default.
    """
    findings = _runtime_class(cluster, profile, request)
    resource = resource or _resource_of(cluster, profile)
    if resource:
        findings += _cards(cluster, resource)
    by_node, skipped = _by_node(cluster, profile, request, resource)
    fits = [name for name, problems in by_node.items() if not problems]
    for name, problems in (by_node | skipped).items():
        label = "note" if fits or name in skipped else "fail"
        findings += [
            ClusterFinding(label, reason, f"{name}: {text}", cure) for reason, text, cure in problems
        ]
    without = f"; skipped, as they have no {resource}: {', '.join(skipped)}" if skipped else ""
    if fits:
        text = f"profile {profile}: found {len(fits)} of {len(cluster.nodes)} nodes that can take a pod: "
        findings.append(ClusterFinding("ok", "", text + ", ".join(fits) + without))
    else:
        text = f"profile {profile}: found no node that can take a pod; expected at least one{without}"
        cure = _fitting_now(cluster, request) or "see the lines above, node by node"
        findings.append(ClusterFinding("fail", "NO_NODE", text, cure))
    return findings


def _by_node(
    cluster: Cluster, profile: str, request: PodRequest, resource: str
) -> tuple[dict[str, list[Problem]], dict[str, list[Problem]]]:
    """What keeps a pod off each node that has the card, and what else is wrong with each of the others."""
    used, oldest = _used(cluster), OLDEST_DRA if profile == "dra" else OLDEST_KUBERNETES
    found: dict[str, list[Problem]] = {}
    skipped: dict[str, list[Problem]] = {}
    for node in cluster.nodes:
        problems = _version(node, oldest)
        if resource and resource not in _allocatable(node):
            skipped[_name(node)] = problems
        else:
            found[_name(node)] = [*problems, *_problems(node, resource, request, used)]
    return found, skipped


def _fitting_now(cluster: Cluster, request: PodRequest) -> str:
    """Names a profile, of those that nodes show, whose pod some node can take; empty if there is none."""
    for profile in ("mindcluster", "hami", "cce", "cpu"):
        asked = request_of(profile, request.cards, request.chip, request.architecture)
        found, _ = _by_node(cluster, profile, asked, _resource_of(cluster, profile))
        fits = [name for name, problems in found.items() if not problems]
        if fits and not _runtime_class(cluster, profile, asked):
            return f"the profile {profile} would fit now, on {', '.join(fits)}; or see the lines above"
    return ""


def _resource_of(cluster: Cluster, profile: str) -> str:
    if profile == "hami":
        names = {name for node in cluster.nodes for name in _allocatable(node) if _HAMI.fullmatch(name)}
        return min(names, default="huawei.com/Ascend910B3")
    return {"cce": CCE, "cpu": "", "dra": ""}.get(profile, MINDCLUSTER)


def _version(node: dict[str, Any], oldest: tuple[int, int]) -> list[Problem]:
    version = _info(node).get("kubeletVersion", "")
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is not None and (int(match[1]), int(match[2])) >= oldest:
        return []
    wanted = ".".join(map(str, oldest))
    text = f"found the kubelet {version or 'of unknown version'}; expected {wanted} or later"
    return [("KUBERNETES_TOO_OLD", text, "upgrade the node")]


def _runtime_class(cluster: Cluster, profile: str, request: PodRequest) -> list[ClusterFinding]:
    wanted = request.runtime_class or ("ascend" if profile == "hami" else "")
    if not wanted or cluster.runtime_classes is None or wanted in cluster.runtime_classes:
        return []
    there = ", ".join(sorted(cluster.runtime_classes)) or "none"
    text = f"runtimeClassName: found the classes {there}; expected {wanted}"
    return [
        ClusterFinding("fail", "NO_RUNTIME_CLASS", text, "install ascend-docker-runtime and its RuntimeClass")
    ]


def _cards(cluster: Cluster, resource: str) -> list[ClusterFinding]:
    """Checks that some node has the card under this name; else tells what the nodes have instead."""
    if any(resource in _allocatable(node) for node in cluster.nodes):
        return []
    others = sorted(
        {name for n in cluster.nodes for name in _allocatable(n) if name.startswith("huawei.com/")}
    )
    whole = [name for name in others if not re.search(r"-(memory|core)$", name)]
    if not whole:
        text = f"found no card on any node; expected {resource}"
        return [ClusterFinding("fail", "NO_CARD", text, "install the device plugin, or use the profile cpu")]
    if any(map(_SLICE.fullmatch, whole)):
        text = f"found slices of cards ({', '.join(whole)}); expected whole ones, {resource}"
        return [
            ClusterFinding("fail", "SLICED_CARD", text, "give the server a node whose cards are not divided")
        ]
    for name in whole:
        if name in _OTHER_CHIPS:
            text = f"found {name}: {_OTHER_CHIPS[name]}; expected {resource}"
            return [
                ClusterFinding("fail", "OTHER_CHIP", text, "use nodes with Atlas training, A2 or A3 cards")
            ]
    text = f"devices.resource: found {', '.join(whole)} on the nodes; expected {resource}"
    cure = f"use the profile {fitting_profile(cluster)}, or set devices.resource to that name"
    return [ClusterFinding("fail", "OTHER_RESOURCE", text, cure)]


def _problems(
    node: dict[str, Any], resource: str, request: PodRequest, used: dict[tuple[str, str], float]
) -> list[Problem]:
    """What keeps a pod off a node."""
    name, allocatable = _name(node), _allocatable(node)
    problems = [*_state(node), *_image(node, resource, request)]
    cards = {resource: request.cards} if resource else {}
    for what, amount in {"cpu": request.cpus, "memory": request.memory_bytes, **cards}.items():
        all_of_it = _quantity(allocatable.get(what, "0"))
        free = all_of_it - used[name, what]
        if amount <= free:
            continue
        reason = "NO_FREE_CARD" if what == resource else f"NO_FREE_{what.upper()}"
        cure = "wait for pods to end, add nodes, or ask for less"
        if what == resource and not all_of_it:
            reason, cure = "NO_HEALTHY_CARD", "look at the device plugin's log: its cards are not healthy"
        elif what == resource and amount > all_of_it:
            reason, cure = "TOO_FEW_CARDS", "lower devices.count, or use larger nodes"
        found = f"found {_told(what, free)} of {_told(what, all_of_it)} {what} free"
        text = f"{found}; expected {_told(what, amount)}"
        problems.append((reason, text, cure))
    return problems


def _state(node: dict[str, Any]) -> list[Problem]:
    spec = node.get("spec") or {}
    found = []
    conditions = {c.get("type"): c.get("status") for c in (node.get("status") or {}).get("conditions") or ()}
    if conditions and conditions.get("Ready") != "True":
        found.append(("NODE_NOT_READY", "the node is not Ready", "see kubectl describe node"))
    if spec.get("unschedulable"):
        found.append(("CORDONED", "the node is cordoned", "kubectl uncordon it"))
    for taint in spec.get("taints") or ():
        key = taint.get("key", "")
        is_known = key in TOLERATED or key.startswith("node.kubernetes.io/")
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not is_known:
            text = f"the chart does not tolerate the taint {key}:{taint['effect']}"
            found.append(("TAINTED", text, f"add {key} to tolerations"))
    return found


def _image(node: dict[str, Any], resource: str, request: PodRequest) -> list[Problem]:
    found = []
    architecture = _info(node).get("architecture", "")
    if request.architecture and architecture and architecture != request.architecture:
        text = f"found the architecture {architecture}; expected {request.architecture}, that of the image"
        found.append(
            ("OTHER_ARCHITECTURE", text, "build the image for it, or set nodeSelector kubernetes.io/arch")
        )
    chip = _chip_of(node, resource) if resource else ""
    if chip and chip != request.chip:
        text = f"found the chip {chip}; expected {request.chip}, that of the image's tag"
        found.append(
            ("OTHER_CHIP", text, f"set image.chip to {chip}: the operators' kernels are in the image")
        )
    return found


def _chip_of(node: dict[str, Any], resource: str) -> str:
    """The chip as image tags spell it, from a label or the resource; empty if neither tells it."""
    labels = (node.get("metadata") or {}).get("labels") or {}
    for told in (labels.get("accelerator-type", ""), resource if _HAMI.fullmatch(resource) else ""):
        for part, chip in _CHIPS:
            if part in told.lower():
                return chip
    return ""


def _used(cluster: Cluster) -> dict[tuple[str, str], float]:
    """What running pods request, by node and resource."""
    used: dict[tuple[str, str], float] = defaultdict(float)
    for pod in cluster.pods or ():
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        spec = pod.get("spec") or {}
        for container in spec.get("containers") or ():
            for what, amount in ((container.get("resources") or {}).get("requests") or {}).items():
                used[spec.get("nodeName", ""), what] += _quantity(amount)
    return used


def _quantity(text: Any) -> float:
    match = re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,2})|([a-zA-Z]*))", str(text))
    if match is None or (match[3] or "") not in _UNITS:
        raise ClusterError(f"found the quantity {text!r}; expected one of Kubernetes, such as 20Gi")
    return float(match[1]) * 10.0 ** int(match[2] or 0) * _UNITS[match[3] or ""]


def _told(what: str, amount: float) -> str:
    return f"{amount / 2**30:.3g}Gi" if what == "memory" else f"{amount:g}"


def _allocatable(node: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (node.get("status") or {}).get("allocatable") or {}
    return found


def _info(node: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = (node.get("status") or {}).get("nodeInfo") or {}
    return found


def _name(item: dict[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name", "?"))
