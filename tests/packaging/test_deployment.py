"""What deploys the service is well formed, and names commands, modules, files and users that exist."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from house.repository import ROOT
from reshard.cli.main import app

IMAGES = ROOT / "deploy" / "images"
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def require_command(words: list[str]) -> None:
    """Fail unless these are the arguments of a `reshard` command."""
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009
    known = {option for parameter in commands[words[0]].params for option in parameter.opts}
    assert [word for word in words[1:] if word.startswith("--") and word not in known] == []


def test_the_compose_file_follows_the_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version" not in compose()


def test_every_service_is_watched_and_not_root() -> None:
    for name, service in compose()["services"].items():
        assert service["healthcheck"]["test"], name
        # Ours say USER in their images.
        assert service.get("user") or service["image"].startswith("reshard"), name
        assert re.search(r":[\w.]+", service["image"]), f"{name}: no tag"
        assert "latest" not in service["image"], name


def test_services_run_commands_that_exist() -> None:
    services = compose()["services"]
    for name in ("api", "worker", "worker-gpu"):
        require_command(services[name]["command"])
    checks = " ".join(str(service["healthcheck"]["test"]) for service in services.values())
    for module in re.findall(r"-A ([\w.]+)", checks):
        assert importlib.util.find_spec(module) is not None
    from reshard_service.api.operators import probes

    assert "/readyz" in {getattr(route, "path", "") for route in probes.routes}


def test_volumes_and_dependencies_are_declared() -> None:
    facts = compose()
    for service in facts["services"].values():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in facts["volumes"]
        assert set(service.get("depends_on", {})) <= set(facts["services"])


def test_the_example_sets_every_variable_that_compose_asks_for() -> None:
    asked = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text()))
    given = set(re.findall(r"^(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert asked == given


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*ockerfile")), ids=lambda path: path.name)
def test_images_are_pinned_and_not_root(path: Path) -> None:
    text = path.read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert base in stages or re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", base), base
    assert re.search(r"^USER \d+$", text, re.MULTILINE)


def test_the_images_copy_what_is_there_and_what_is_let_through() -> None:
    allowed = set(re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied: set[str] = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", (IMAGES / "Dockerfile").read_text(), re.MULTILINE):
        copied |= set(line.split()[:-1])
    assert {"deploy/images" if name.startswith("deploy/images/") else name for name in copied} <= allowed
    assert all((ROOT / name).exists() for name in copied)
    # A wheel built without one of them would lack it without an error.
    assert {"client", "worker", "service"} <= copied


def test_compose_builds_targets_that_exist() -> None:
    stages = set(re.findall(r"AS (\S+)", (IMAGES / "Dockerfile").read_text()))
    for service in compose()["services"].values():
        build = service.get("build")
        if build:
            assert (ROOT / build["context"] / build["dockerfile"]).exists()
            assert build.get("target") in stages | {None}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_parse_and_their_containers_run_our_commands(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert {"apiVersion", "kind"} <= set(document)
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
        for container in pod["containers"]:
            require_command(container["args"])
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}


def test_kustomize_lists_files_that_exist() -> None:
    directory = ROOT / "deploy" / "kubernetes"
    listed = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    assert all((directory / name).exists() for name in listed)


@pytest.mark.parametrize("path", [p for p in MANIFESTS if p.name != "kustomization.yaml"], ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_knows(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_a_misspelt_field_is_found() -> None:
    budget = next(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "disruption.yaml").read_text()))
    budget["spec"]["minAvailble"] = budget["spec"].pop("minAvailable")
    with pytest.raises(kubernetes_validate.ValidationError, match="minAvailble"):
        kubernetes_validate.validate(budget, "1.37", strict=True)


def test_policies_and_budgets_select_the_pods_that_are_deployed() -> None:
    directory = ROOT / "deploy" / "kubernetes"
    names = ("api.yaml", "worker.yaml", "worker-gpu.yaml", "disruption.yaml", "network.yaml")
    documents = [d for name in names for d in yaml.safe_load_all((directory / name).read_text())]
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] == "Deployment"]
    selectors = [d["spec"].get("selector") or d["spec"].get("podSelector") for d in documents if "Policy" in d["kind"]]
    selectors += [d["spec"]["selector"] for d in documents if d["kind"] == "PodDisruptionBudget"]
    chosen = [[labels["app.kubernetes.io/component"] for labels in pods if _selects(s, labels)] for s in selectors]
    assert sorted(chosen) == [["api"], ["api"], ["worker", "worker-gpu"], ["worker", "worker-gpu"]]


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_autoscaler() -> None:
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "kubernetes"
        shutil.copytree(ROOT / "deploy" / "kubernetes", copy)
        kustomization = copy / "kustomization.yaml"
        kustomization.write_text(kustomization.read_text() + "components: [autoscaling]\n")
        rendered = subprocess.run(
            ["kubectl", "kustomize", str(copy)], capture_output=True, text=True, check=True
        ).stdout
    documents = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(rendered)}
    scaler = documents["ScaledObject", "reshard-worker"]
    assert scaler["metadata"]["namespace"] == "reshard"
    assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in documents
    assert "replicas" not in documents["Deployment", "reshard-worker"]["spec"]
    assert documents["Deployment", "reshard-api"]["spec"]["replicas"] == 2


def test_kustomize_leaves_the_training_examples_to_their_users() -> None:
    # They are for another namespace, and need JobSet or Trainer; tests/recipes runs them.
    listed = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert (ROOT / "deploy" / "kubernetes" / "training" / "jobset.yaml").exists()
    assert not any("training" in name for name in listed)
