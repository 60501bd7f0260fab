"""The chart, rendered by Helm's own library, against Kubernetes' schemas.

lint judges its engine file.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.chart import (
    CHART,
    HERE,
    LOADER,
    RECIPES,
    ROOT,
    VALUES,
    chart,
    golden,
    load,
    named,
    objects,
    objects_of,
    table,
)
from tests.json_files import read_json
from trtspec.launch.serve_options import ENGINE, FRONT, ServeOptions
from trtspec.records import checked, parse
from trtspec.trtllm.build import build_named
from trtspec.trtllm.intent import Intent, parse_intent
from trtspec.trtllm.serve.front import read_front
from trtspec.verbs.serve import plan_engine

helm_python = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

EVERY = [*VALUES, *RECIPES]
SERVING = [path for path in EVERY if load(path).get("stage") != "models"]
KUBERNETES = ("1.31", "1.34", "1.37")


def pod_specs(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    specs = []
    for item in found:
        if item["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            specs.append(item["spec"]["template"]["spec"])
        if item["kind"] == "Pod":
            specs.append(item["spec"])
        if item["kind"] == "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            specs += [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    return specs


def engines(path: Path) -> list[dict[str, Any]]:
    """The containers that run an engine's command."""
    containers = [
        c
        for spec in pod_specs(objects_of(path))
        for c in spec["containers"]
        if c["name"] == "server"
    ]
    return [container for container in containers if "serve" in container["args"]]


def test_scaling_one_part_restarts_no_other() -> None:
    values = load(named("disaggregated"))
    values["disaggregated"]["context"]["replicas"] += 1
    before, after = objects(load(named("disaggregated"))), objects(values)
    checksums = [
        {
            item["metadata"]["name"]: json.dumps(
                item["spec"]["template"]["metadata"]["annotations"]
            )
            for item in found
            if "template" in item.get("spec", {})
            and "annotations" in item["spec"]["template"]["metadata"]
        }
        for found in (before, after)
    ]
    changed = {name for name in checksums[0] if checksums[0][name] != checksums[1][name]}
    assert (
        len(checksums[0]) == 3
        and changed == {name for name in changed if name.endswith("front")}
        and changed
    )


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_rendered_as_the_golden_file(path: Path) -> None:
    """After a wanted change: python -m tests.docker.chart, and read the difference."""
    assert golden(load(path)) == (HERE / "goldens" / path.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_helm_lint_and_the_values_schema_agree(path: Path) -> None:
    values = load(path)
    chart().validate_schema(values)
    result = helm_python.lint(str(CHART), values=values)
    messages = result["messages"] if isinstance(result, dict) else result.messages
    assert not [
        m for m in messages if (m["severity"] if isinstance(m, dict) else m.severity) >= 2
    ], messages


@functools.cache
def custom_schema(kind: str) -> dict[str, Any] | None:
    """Schema of a custom resource: ours for the fields the chart uses, or from TRTSPEC_CRDS=DIR.

    That folder has the projects' own.
    """
    if directory := os.environ.get("TRTSPEC_CRDS"):
        for path in Path(directory).glob("*.yaml"):
            resource = yaml.load(path.read_text(), Loader=LOADER)["spec"]
            if resource["names"]["kind"] == kind:
                return closed(resource["versions"][-1]["schema"]["openAPIV3Schema"])
    own = HERE / "schemas" / f"{kind}.json"
    return read_json(own) if own.exists() else None


def closed(schema: Any) -> Any:
    """Refuses unknown fields, as an API server does in strict mode."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if key != "default" and "(?i)" not in str(schema.get("pattern"))
    }
    found = {key: closed(value) for key, value in kept.items()}
    if (
        isinstance(schema.get("properties"), dict)
        and schema["properties"]
        and schema.get("type") == "object"
    ):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def validate(text: str, version: str) -> None:
    """Validates strictly by Kubernetes' own schema, each object once for all values sets."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """The library parses a schema of some megabytes for each object."""
    with pytest.MonkeyPatch.context() as patch:
        utils = kubernetes_validate.utils
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_objects_are_kubernetes_objects(path: Path, version: str) -> None:
    import jsonschema

    for item in objects_of(path):
        custom = custom_schema(item["kind"])
        if custom is None:
            validate(json.dumps(item, sort_keys=True), version)
        elif version == KUBERNETES[0]:
            jsonschema.validate(item, custom)
        if item["kind"] == "LeaderWorkerSet":
            for role in ("leaderTemplate", "workerTemplate"):
                template = item["spec"]["leaderWorkerTemplate"][role]
                pod = {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": role},
                    "template": template,
                }
                validate(json.dumps(pod, sort_keys=True), version)


@pytest.mark.parametrize("path", SERVING, ids=lambda path: path.stem)
def test_the_pod_runs_trtspec_serve_on_exactly_what_build_config_wrote(
    path: Path, tmp_path: Path
) -> None:
    """The command of each engine, dry-run as it is but for the place of its file."""
    (config,) = (
        i
        for i in objects_of(path)
        if i["kind"] == "ConfigMap" and i["metadata"]["name"][-9:] != "dashboard"
    )
    for container in engines(path):
        args = container["args"]
        words = args[args.index("trtspec") :]
        place = words.index("--config") + 1
        name = Path(words[place]).name
        text = config["data"][name]
        (tmp_path / name).write_text(text)
        words[place] = str(tmp_path / name)
        intent = parse_intent(text)
        assert intent is not None and words[:3] == ["trtspec", "serve", intent.target]
        options = parse(ServeOptions, words[2:], "serve")
        start = checked(options, ENGINE)
        if intent.like is not None:  # a directory that a Job makes
            start = dataclasses.replace(start, target=intent.like)
        plan = plan_engine(start, launching=False)
        assert not [problem for problem in plan.problems if problem.severity == "error"], (
            plan.problems
        )
        assert plan.endpoint.host == "0.0.0.0" and plan.endpoint.port == 8000
        assert start.startup_timeout >= 900 and plan.limits.stop_grace < container_grace(path)


def container_grace(path: Path) -> int:
    servers = [
        spec for spec in pod_specs(objects_of(path)) if spec["containers"][0]["name"] == "server"
    ]
    return min(spec["terminationGracePeriodSeconds"] for spec in servers)


def test_the_front_names_every_server_and_nothing_else(tmp_path: Path) -> None:
    """The front's file equals `build-config --role front`, and its addresses are those of pods."""
    for name, context in (("disaggregated", 3), ("disaggregated-nodes", 1)):
        found = objects_of(named(name))
        (config,) = (item for item in found if item["kind"] == "ConfigMap")
        front = yaml.safe_load(config["data"]["front.yml"])
        urls = {role: front[f"{role}_servers"]["urls"] for role in ("context", "generation")}
        intent = Intent(
            target="nvidia/Kimi-K2.6-NVFP4", version="1.4.0rc1", role="front",
            context_urls=tuple(urls["context"]), generation_urls=tuple(urls["generation"]),
        )  # fmt: skip
        assert front == yaml.safe_load(build_named(intent).text)
        addresses = set()
        for item in found:
            if item["kind"] in ("StatefulSet", "LeaderWorkerSet"):
                own = item["metadata"]["name"]
                assert item["kind"] == "LeaderWorkerSet" or item["spec"]["serviceName"] == own
                addresses |= {
                    f"{own}-{index}.{own}:8000" for index in range(item["spec"]["replicas"])
                }
        assert (
            set(urls["context"]) | set(urls["generation"]) == addresses
            and len(urls["context"]) == context
        )
        (tmp_path / "front.yml").write_text(config["data"]["front.yml"])
        (pod,) = (spec for spec in pod_specs(found) if spec["containers"][0]["name"] == "front")
        words = [
            word.replace("/etc/trtspec", str(tmp_path)) for word in pod["containers"][0]["args"]
        ]
        read = read_front(config["data"]["front.yml"], tmp_path / "front.yml")
        assert read.hostname == "0.0.0.0" and words[:2] == ["trtspec", "serve"]
        start = checked(parse(ServeOptions, words[2:], "serve"), FRONT)
        assert start.target == "nvidia/Kimi-K2.6-NVFP4" and start.startup_timeout > 3600


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_pods_are_unprivileged_and_fit_the_checkpoint(path: Path) -> None:
    values = load(path)
    for spec in pod_specs(objects_of(path)):
        assert (
            spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        )
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            if container["name"] in ("server", "front", "download", "quantize") and path in SERVING:
                assert "/tmp" in {
                    mount["mountPath"] for mount in container["volumeMounts"]
                }  # its root is read-only
            tokens = [item for item in container.get("env", []) if "TOKEN" in item["name"]]
            assert all("value" not in item for item in tokens) and (
                container["name"] == "download" or not tokens
            )
    for container in engines(path):
        probe = container["startupProbe"]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        speed = values.get("probes", {}).get("loadMiBPerSecond", 200)
        assert seconds >= values["model"]["sizeGiB"] * 1024 / speed + 900
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[name]["httpGet"]["path"] == "/health"
        assert (
            container["livenessProbe"].get("timeoutSeconds", 0)
            < container["livenessProbe"]["periodSeconds"]
        )


def test_what_watch_brings_fits_the_chart() -> None:
    """The alert rules and the dashboard of docker/monitoring, by --set-file."""
    import jsonschema

    monitoring = ROOT / "docker" / "monitoring"
    values = load(named("one-node-latency"))
    texts = {"rules": monitoring / "alerts.yml", "dashboard": monitoring / "dashboard.json"}
    values["metrics"] = {key: path.read_text() for key, path in texts.items()}
    found = objects(values)
    (rules,) = (item for item in found if item["kind"] == "PrometheusRule")
    jsonschema.validate(rules, custom_schema("PrometheusRule"))
    assert any(item["metadata"]["labels"].get("grafana_dashboard") == "1" for item in found)


def test_values_file_schema_and_page_name_the_same_values() -> None:
    schema = read_json(CHART / "values.schema.json")
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(defaults) | {"global"} == set(schema["properties"])
    for name, part in schema["properties"].items():
        if "properties" in part:
            assert set(part["properties"]) == set(defaults[name]), name
        assert part.get("description"), name


BAD = [
    pytest.param(base, *row, id=f"{row[0]}={row[1]}"[:50])
    for base, rows in table("refused.yaml").items()
    for row in rows
]


@pytest.mark.parametrize(("base", "key", "value", "says"), BAD)
def test_bad_values_are_refused_with_the_reason(base: str, key: str, value: Any, says: str) -> None:
    values = load(named(base))
    place = values
    *parents, last = key.removesuffix("+").split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = place[last] + value if key.endswith("+") else value
    with pytest.raises(helm_python.HelmError) as refused:
        chart().render(values, name="kimi", namespace="serving")
    assert says in str(refused.value).replace(".", "/") or says in str(refused.value)


def test_labels_limits_secrets_and_own_objects_reach_the_cluster() -> None:
    values = load(named("disaggregated"))
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-own"}}
    secret, variable = [{"secretRef": {"name": "keys"}}], {"name": "KEY", "value": "x"}
    values |= {
        "podLabels": {"team": "kimi"},
        "extraObjects": [own],
        "server": {"envFrom": secret, "env": [variable]},
    }
    values["resources"] = {"limits": {"cpu": "32", "memory": "1500Gi"}}
    found = objects(values)
    for item in found:
        if custom_schema(item["kind"]) is None:
            validate(json.dumps(item, sort_keys=True), KUBERNETES[-1])
    templates = [
        item["spec"]["template"] for item in found if item["kind"] in ("Deployment", "StatefulSet")
    ]
    assert len(templates) == 3 and all(
        one["metadata"]["labels"]["team"] == "kimi" for one in templates
    )
    servers = [c for one in templates for c in one["spec"]["containers"] if c["name"] == "server"]
    assert (
        all(one["envFrom"] == secret and variable in one["env"] for one in servers)
        and len(servers) == 2
    )
    assert all(
        {("cpu", "32"), ("memory", "1500Gi")} < set(one["resources"]["limits"].items())
        for one in servers
    )
    assert "kimi-own" in [item["metadata"]["name"] for item in found if item["kind"] == "ConfigMap"]


def test_values_without_a_recipe_are_refused() -> None:
    with pytest.raises(helm_python.HelmError):
        chart().render({}, name="kimi", namespace="serving")
