"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, equal in substance to the kustomize files."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from house.repository import ROOT

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has wheels for Linux on x86-64")

CHART = ROOT / "deploy" / "helm" / "reshard"
KUSTOMIZE = ROOT / "deploy" / "kubernetes"
EVERYTHING: dict[str, Any] = {
    "workerGpu": {
        "enabled": True,
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "autoscaling": {"enabled": True, "maxReplicas": 20},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a": "b"}},
    "image": {"repository": "registry.example.org/reshard", "tag": "0.1.0-1", "pullSecrets": ["registry"]},
    "api": {"podAnnotations": {"prometheus.io/scrape": "true"}},
    "service": {"type": "NodePort", "port": 8080},
}
VALUES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": EVERYTHING,
    "GPU workers that follow the work": {
        "worker": {"enabled": False},
        "workerGpu": {"enabled": True},
        "autoscaling": {"enabled": True, "kind": "worker-gpu", "minReplicas": 0},
    },
    "the least": {
        "worker": {"enabled": False},
        "disruptionBudgets": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
}


def render(values: dict[str, Any], *, name: str = "reshard") -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        made = chart.render(values, name=name, namespace="reshard")
    texts = [text for path, text in sorted(made.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def named(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def test_helm_finds_nothing_to_complain_about() -> None:
    report = helm.lint(str(CHART), strict=True)
    # An icon is recommended, and no fault.
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("name", ["reshard", "team-a"])
def test_what_it_renders_is_what_kubernetes_knows(values: dict[str, Any], name: str) -> None:
    documents = render(values, name=name)
    for document in documents:
        if not document["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(document, "1.37", strict=True)
        assert document["metadata"]["name"].startswith(name)
    facts = named(documents)
    deployments = [document for document in documents if document["kind"] == "Deployment"]
    for deployment in deployments:
        require_safe(deployment)
    pods = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in deployments]
    for document in documents:
        if document["kind"] in {"PodDisruptionBudget", "NetworkPolicy"}:
            selector = document["spec"].get("selector") or document["spec"]["podSelector"]
            chosen = {labels["app.kubernetes.io/component"] for labels in pods if selects(selector, labels)}
            wanted = {"api"} if document["metadata"]["name"].endswith("-api") else {"worker", "worker-gpu"}
            assert chosen == wanted & {labels["app.kubernetes.io/component"] for labels in pods}
        if document["kind"] == "ScaledObject":
            scaled = facts["Deployment", document["spec"]["scaleTargetRef"]["name"]]
            assert "replicas" not in scaled["spec"]
            (trigger,) = document["spec"]["triggers"]
            assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in facts
        assert document["kind"] != "Secret"


def require_safe(deployment: dict[str, Any]) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert selects(deployment["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        assert container["livenessProbe"]
        assert container["resources"]["limits"]["memory"]
        assert {"secretRef": {"name": "reshard"}} in container["envFrom"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


def test_it_says_what_the_kustomize_files_say() -> None:
    """Beside labels, annotations and the image's defaults, which only Helm has."""
    names = ("settings", "api", "worker", "worker-gpu", "disruption", "network", "autoscaling/scaler")
    theirs = named([d for name in names for d in yaml.safe_load_all((KUSTOMIZE / f"{name}.yaml").read_text())])
    ours = named(render({"workerGpu": {"enabled": True}, "autoscaling": {"enabled": True}}))
    # As the component of kustomize does.
    del theirs["Deployment", "reshard-worker"]["spec"]["replicas"]
    # The release is called as kustomize's objects are, but for this one.
    assert set(ours) == set(theirs)
    for key, document in ours.items():
        assert substance(document) == substance(theirs[key]), key


def substance(document: dict[str, Any]) -> dict[str, Any]:
    """A document without what differs by the tool that made it."""
    made = copy.deepcopy(document)
    made["metadata"] = {"name": made["metadata"]["name"]}
    spec = made.get("spec", {})
    for selector in (spec.get("selector"), spec.get("podSelector")):
        if selector:
            selector.get("matchLabels", selector).pop("app.kubernetes.io/instance", None)
    if made["kind"] == "Deployment":
        labels = spec["template"]["metadata"]["labels"]
        spec["template"]["metadata"] = {"labels": {n: labels[n] for n in spec["selector"]["matchLabels"]}}
        for container in spec["template"]["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
    if made["kind"] == "Service" and spec.get("type") == "ClusterIP":
        del spec["type"]
    return made


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"settings": {"RESHARD_ROOTS": "/x", "RESHARD_TOKEN": "secret"}}, "RESHARD_TOKEN"),
        ({"settings": {"RESHARD_ROOTS": "/x", "AWS_SECRET_ACCESS_KEY": "secret"}}, "AWS_SECRET_ACCESS_KEY"),
        ({"settings": {"RESHARD_ROOTS": "/x", "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret"}}, "HEADERS"),
        ({"settings": {"RESHARD_ROOTS": ""}}, "RESHARD_ROOTS"),
        ({"settings": {"RESHARD_LEASE_S": 60}}, "RESHARD_LEASE_S"),
        ({"wroker": {"replicas": 3}}, "wroker"),
        ({"worker": {"replicas": "three"}}, "replicas"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"existingSecret": ""}, "existingSecret"),
        ({"networkPolicy": {"from": []}}, "from"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], word: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError) as caught:
        chart.validate_schema(values)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"autoscaling": {"enabled": True, "kind": "worker-gpu"}},
        {"autoscaling": {"enabled": True, "minReplicas": 9}},
    ],
)
def test_values_that_do_not_fit_together_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match=r"autoscaling\."):
        render(values)


def test_variables_of_opentelemetry_are_settings() -> None:
    facts = named(render({"settings": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}}))
    assert facts["ConfigMap", "reshard"]["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"


def test_settings_reach_the_pods_that_read_them() -> None:
    first, other = (named(render({"settings": {"RESHARD_LEASE_S": text}})) for text in ("60", "90"))
    key = ("Deployment", "reshard-api")
    assert other["ConfigMap", "reshard"]["data"]["RESHARD_LEASE_S"] == "90"
    annotations = [facts[key]["spec"]["template"]["metadata"]["annotations"] for facts in (first, other)]
    assert annotations[0] != annotations[1], "pods would go on with the old settings"


def test_the_schema_knows_all_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    with helm.Chart.load(str(CHART)) as loaded:
        assert loaded.values() == values if callable(loaded.values) else loaded.values == values
        loaded.validate_schema({})
    assert chart["appVersion"] == chart["version"]
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="where the chart is packaged")
def test_it_can_be_packaged(tmp_path: Path) -> None:
    made = Path(helm.package(str(CHART), destination=str(tmp_path)))
    assert made.name == "reshard-0.1.0.tgz"
