"""The chart: rendered by Helm's own library, held against Kubernetes' schemas, and its engine file against lint."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.chart import CHART, HERE, RECIPES, ROOT, VALUES, chart, golden, kind, load, objects_of
from trtspec.trtllm.deployment import deployment_of, parse_passed
from trtspec.trtllm.lint.linter import lint
from trtspec.trtllm.schema import schema_for

helm_python = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

EVERY = [*VALUES, *RECIPES]
KUBERNETES = ("1.29", "1.33", "1.37")


def pod_specs(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    specs = []
    for item in found:
        if item["kind"] in ("Deployment", "Job"):
            specs.append(item["spec"]["template"]["spec"])
        if item["kind"] == "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            specs += [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]
    return specs


def server(path: Path) -> dict[str, Any]:
    """The container that answers requests."""
    containers = [c for spec in pod_specs(objects_of(path)) for c in spec["containers"] if c["name"] == "server"]
    return containers[0]


def test_there_are_enough_values_sets() -> None:
    assert len(VALUES) >= 6


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
    assert not [m for m in messages if (m["severity"] if isinstance(m, dict) else m.severity) >= 2], messages


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.stem)
def test_objects_are_kubernetes_objects(path: Path, version: str) -> None:
    for item in objects_of(path):
        own = HERE / "schemas" / f"{item['kind']}.json"
        if own.exists():
            import jsonschema

            jsonschema.validate(item, json.loads(own.read_text()))
        else:
            kubernetes_validate.validate(item, version, strict=True)
        if item["kind"] == "LeaderWorkerSet":
            for role in ("leaderTemplate", "workerTemplate"):
                template = item["spec"]["leaderWorkerTemplate"][role]
                pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": template}
                kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_the_engine_gets_exactly_what_build_config_wrote_and_lint_passes_it(path: Path) -> None:
    values = load(path)
    version = values["image"]["tag"].partition("-")[0]
    (config,) = (item for item in objects_of(path) if item["kind"] == "ConfigMap")
    text = config["data"]["engine.yml"]
    assert text == values["engineConfig"]
    deployment = deployment_of(text, version=version, target=None, head=None)[0]
    assert not [finding for finding in lint(text, deployment) if finding.severity == "error"]
    args = server(path)["args"]
    start = args.index("trtllm-serve")
    assert args[start + 1] == values["model"]["target"]
    passed, problems = parse_passed(schema_for(version), args[start + 2 :])
    assert not [problem for problem in problems if problem.severity == "error"], problems
    given = {item.option.name: item.value for item in passed}
    assert given["extra_llm_api_options"] == "/etc/trtspec/engine.yml" and given["host"] == "0.0.0.0"
    keys = {item.option.key for item in passed if item.option.key}
    assert not keys & set(yaml.safe_load(text)), "a setting stands in the file and in the options"


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_pods_are_unprivileged_and_fit_the_checkpoint(path: Path) -> None:
    values = load(path)
    for spec in pod_specs(objects_of(path)):
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            tokens = [item for item in container.get("env", []) if "TOKEN" in item["name"]]
            assert all("value" not in item for item in tokens) and (container["name"] == "download" or not tokens)
    container = server(path)
    probe = container["startupProbe"]
    seconds = probe["periodSeconds"] * probe["failureThreshold"]
    size = values["model"].get("sizeGiB", 640)
    assert seconds >= size * 1024 / 200 + 900 and probe["httpGet"]["path"] == "/health"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": str(values["gpusPerNode"])}
    (shared,) = (
        volume["emptyDir"]
        for spec in pod_specs(objects_of(path))[-1:]
        for volume in spec["volumes"]
        if volume["name"] == "shared-memory"
    )
    assert shared["medium"] == "Memory" and int(shared["sizeLimit"].removesuffix("Gi")) >= size


def test_prometheus_is_sent_where_prometheus_text_is() -> None:
    (monitor,) = kind(load(HERE / "values" / "monitored.yaml"), "ServiceMonitor")
    assert monitor["spec"]["endpoints"] == [{"port": "http", "path": "/prometheus/metrics", "interval": "15s"}]


def test_a_new_configuration_restarts_the_server_and_another_checkpoint_is_another_job() -> None:
    values = load(VALUES[0])
    other = copy.deepcopy(values)
    other["engineConfig"] += "print_iter_log: true\n"
    first, second = (kind(each, "Deployment")[0]["spec"]["template"]["metadata"] for each in (values, other))
    assert first["annotations"] != second["annotations"] and first["labels"] == second["labels"]
    base = load(HERE / "values" / "one-node-latency.yaml")
    names = {item["metadata"]["name"] for path in VALUES for item in objects_of(path) if item["kind"] == "Job"}
    assert len(names) >= 4 and kind(base, "Job")[0]["metadata"]["name"] in names


BAD = [
    ("one-node-latency", "image.tag", "latest", "image/tag"),
    ("one-node-latency", "image.tag", "1.2.1", "was written for TensorRT-LLM 1.3.0rc20 and image.tag is 1.2.1"),
    ("one-node-latency", "image.repository", "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20", "image/repository"),
    ("one-node-latency", "model.target", "nvidia/Kimi-K2.6-NVFP4", "was not written for model.target nvidia/Kimi-K2.6"),
    ("one-node-latency", "model.target", "Kimi", "model/target"),
    ("one-node-latency", "model.head", None, 'model.head is "" and engineConfig names "nvidia/Kimi-K2.5-Eagle3"'),
    ("one-node-latency", "model.sizeGiB", "556", "model/sizeGiB"),
    ("one-node-latency", "gpusPerNode", 8, "server.args use 4 GPUs (tp 4 x pp 1 x cp 1) and nodes x gpusPerNode is 8"),
    ("one-node-latency", "nodes", 0, "nodes"),
    ("one-node-latency", "gpuProduct", "A100", "gpuProduct"),
    ("one-node-latency", "server.args", [], "server/args"),
    ("one-node-latency", "server.args+", ["--config", "x.yml"], "the chart passes engineConfig itself"),
    ("one-node-latency", "server.args+", ["--host=localhost"], "the Service reaches only 0.0.0.0"),
    (
        "one-node-latency",
        "server.env",
        [{"name": "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "value": "2"}],
        "corrupt",
    ),
    ("one-node-latency", "engineConfig", "max_batch_size: 8\n", "does not begin with the line"),
    ("one-node-latency", "engineConfig+", "a: [\n", "engineConfig is not YAML"),
    ("one-node-latency", "hfToken", "hf_abcdef", "hfToken"),
    ("one-node-latency", "hfToken.token", "hf_abcdef", "hfToken"),
    ("one-node-latency", "cache.size", "500Gi", "cache.size 500Gi does not hold model.sizeGiB 556"),
    ("one-node-latency", "cache.size", "1TB", "cache/size"),
    ("one-node-latency", "replicas", 2, "set cache.accessMode to ReadWriteMany"),
    ("one-node-latency", "metrics.serviceMonitor.enabled", True, "build-config --set return_perf_metrics=true"),
    ("one-node-latency", "quantize.enabled", True, "needs quantize.source and quantize.image"),
    ("one-node-latency", "terminationGracePeriodSeconds", 5, "terminationGracePeriodSeconds"),
    ("one-node-latency", "sever", {"args": []}, "sever"),
    ("two-nodes", "ssh.existingSecret", "", "several nodes need ssh.existingSecret"),
    ("two-nodes", "cache.accessMode", "ReadWriteOnce", "set cache.accessMode to ReadWriteMany"),
    ("quantized", "download.enabled", "yes", "download/enabled"),
    ("quantized", "quantize.enabled", False, "cannot be downloaded"),
]


@pytest.mark.parametrize(("base", "key", "value", "says"), BAD, ids=[f"{key}={value}"[:50] for _, key, value, _ in BAD])
def test_bad_values_are_refused_with_the_reason(base: str, key: str, value: Any, says: str) -> None:
    values = load(HERE / "values" / f"{base}.yaml")
    place = values
    *parents, last = key.removesuffix("+").split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = place[last] + value if key.endswith("+") else value
    with pytest.raises(helm_python.HelmError) as refused:
        chart().render(values, name="kimi", namespace="serving")
    assert says in str(refused.value).replace(".", "/") or says in str(refused.value)


def test_values_without_a_recipe_are_refused() -> None:
    with pytest.raises(helm_python.HelmError):
        chart().render({}, name="kimi", namespace="serving")


def test_tags_schemas_and_the_table_of_the_documents_agree() -> None:
    """One version is the default everywhere, and every tag that a file names stands in the table with its line."""
    table = dict(re.findall(r"^\| `(\d[^`]*)` \| ([^|]+?) \|", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE))
    default = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    tags = {load(path)["image"]["tag"].partition("-")[0] for path in EVERY} | {default}
    for file in ("serve.Dockerfile", "compose.b200.yml"):
        text = (ROOT / "docker" / file).read_text()
        tags |= set(re.findall(r"TRTLLM_VERSION(?:=|:-)([0-9][\w.]*)", text))
    assert tags <= set(table), f"not in docs/deploy.md: {tags - set(table)}"
    for tag, line in table.items():
        assert schema_for(tag).line == line
    from trtspec.checkpoint.named import load_head, load_target
    from trtspec.trtllm.releases import default_version

    newest, _ = default_version(load_target("nvidia/Kimi-K2.5-NVFP4").spec, load_head("nvidia/Kimi-K2.5-Eagle3").spec)
    assert default == newest


@pytest.mark.parametrize("name", ["leader.sh", "worker.sh"])
def test_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(CHART / "scripts" / name)], check=True)


def test_the_leader_starts_a_rank_per_gpu_and_keeps_what_is_its_own(tmp_path: Path) -> None:
    """leader.sh for real, with an ssh and an mpirun that say what they were asked for."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in (("ssh", "exit 0"), ("mpirun", 'printf "%s\\n" "$@"')):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "id_ed25519").write_text("key\n")
    environ = {
        "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "TRTSPEC_SSH_KEYS": str(tmp_path),
        "LWS_LEADER_ADDRESS": "kimi-0.kimi.serving", "LWS_GROUP_SIZE": "3", "TRTSPEC_GPUS_PER_NODE": "4",
        "NCCL_DEBUG": "WARN", "HOSTNAME": "kimi-0", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }  # fmt: skip
    command = ["bash", str(CHART / "scripts" / "leader.sh"), "trtllm-serve", "model", "--tp_size", "12"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    hosts = "kimi-0.kimi.serving:4,kimi-0-1.kimi.serving:4,kimi-0-2.kimi.serving:4"
    assert words[:6] == ["-np", "12", "-N", "4", "--host", hosts]
    assert words[-5:] == ["trtllm-llmapi-launch", *command[2:]]
    exported = {after for word, after in zip(words, words[1:], strict=False) if word == "-x"}
    assert {"NCCL_DEBUG", "PATH"} <= exported
    assert not {"HOSTNAME", "KUBERNETES_SERVICE_HOST", "LWS_GROUP_SIZE"} & exported
    assert (tmp_path / "ssh" / "id_ed25519").stat().st_mode & 0o77 == 0
