"""An engine configuration for a cluster: values of our Helm chart, or a Dynamo deployment.

Both carry the engine's YAML as text, byte for byte as `--format yaml` writes it, and the sizes as
options beside it. The objects of a Dynamo deployment follow ai-dynamo/dynamo 1e4f6939,
recipes/kimi-k2.5/trtllm. The options of its worker follow aiconfigurator.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from typing import Any

import yaml
from packaging.version import Version

from trtspec.checkpoint.hub import engine_path, find_target, load_head
from trtspec.errors import Problem, UsageError
from trtspec.planning.memory import checkpoint_bytes, head_parameters
from trtspec.trtllm.build import EngineConfig
from trtspec.trtllm.deployment import dynamo_options, dynamo_releases
from trtspec.trtllm.document import YamlDumper
from trtspec.trtllm.intent import CACHES, WEIGHTS, Intent, Role
from trtspec.trtllm.schema import read_beside

IMAGE = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime"
CONFIG = "/config"
CHANNEL = "compute-domain-channel"
PARTS: dict[Role | None, str] = {None: "agg", "context": "prefill", "generation": "decode"}


class _Text(str):
    """Text in a literal block, so that the engine's YAML keeps its comments and stays readable."""


YamlDumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def _dump(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=YamlDumper, sort_keys=False, width=10**6)


def helm_values(*configs: EngineConfig, quantize_from: str | None = None) -> str:
    """The keys of docker/helm/trtspec for a whole server, or for context and generation servers.

    Files of one server each go together: `helm -f context.yaml -f generation.yaml`. Sizes and trust
    in the target's code are on the first line of each engine file, where `trtspec serve` reads
    them. Raises UsageError for a front.

    `quantize_from`: the checkpoint that a Job of the chart quantizes into the target's directory.
    """
    intent = replace(configs[-1].intent, format="helm-values", quantize_from=quantize_from)
    if intent.role == "front":
        message = "the chart writes the front's file itself"
        raise UsageError(message, "pass `role` context or generation, or no role")
    size = checkpoint_gib(intent)
    model = {"target": intent.target, "head": intent.head, "sizeGiB": size}
    values: dict[str, Any] = {"image": {"tag": intent.version}, "model": model}
    if quantize_from is not None:
        values |= _quantize(quantize_from, size)
    if intent.gpu:
        values["gpuProduct"] = intent.gpu.upper()
    if any(config.intent.nvlink_joins_nodes for config in configs):
        values["computeDomain"] = {"enabled": True}
    if intent.role is None:
        values |= _server(configs[0])
    else:
        values["disaggregated"] = {str(config.intent.role): _server(config) for config in configs}
    first_line = intent.first_line()
    if len(configs) > 1:
        first_line = f"{replace(intent, role=None).first_line()} --disaggregated ."
    return f"{first_line}\n{_dump(values)}"


def _server(config: EngineConfig) -> dict[str, Any]:
    intent = config.intent
    return {
        "nodes": intent.nodes,
        "gpusPerNode": intent.gpus_per_node,
        "engineConfig": _Text(config.text),
    }


def _quantize(source: str, target_gib: int) -> dict[str, Any]:
    """The Job's values, and a claim that holds source and result with a tenth to spare."""
    source_bytes = checkpoint_bytes(find_target(source).spec)
    source_gib = -(-source_bytes // 2**30)
    claim_gib = -(-(source_gib + target_gib) * 11 // 10)
    return {
        "quantize": {"enabled": True, "source": source, "sourceGiB": source_gib},
        "cache": {"size": f"{claim_gib}Gi"},
    }


def checkpoint_gib(intent: Intent) -> int:
    """GiB of both checkpoints, rounded up, from the shapes. The head's embedding counts too."""
    total = checkpoint_bytes(find_target(intent.target, intent.like).spec)
    if intent.head is not None:
        spec = load_head(intent.head).spec
        embedding = spec.vocab_size * spec.hidden_size
        total += 2 * head_parameters(spec) + 2 * embedding
    return -(-total // 2**30)


def dynamo(configs: list[EngineConfig], image: str | None = None) -> str:
    """The YAML of a ConfigMap, of ComputeDomains and of the DynamoGraphDeployment.

    The ConfigMap has the engine YAML of each server. A server has a ComputeDomain if ranks of
    several trays share NVLink. The weights lie on the claim `model-cache`, as in Dynamo's recipes.
    Raises UsageError for an engine version that no Dynamo release carries, unless an image is
    named.
    """
    split = len(configs) > 1
    whole = replace(configs[-1].intent, role=None, format="dynamo", image=image)
    for checkpoint in filter(None, (whole.target, whole.head)):
        is_path = checkpoint.startswith(("/", ".", "~"))
        if is_path and not checkpoint.startswith(f"{WEIGHTS}/"):
            message = f"{checkpoint} is not on the claim that the workers mount at {WEIGHTS}"
            raise UsageError(message, CHECKPOINT_REMEDY)
    image = image or _image(whole.version)
    name = _name(whole)
    services = {"Frontend": _template("frontend")}
    services["Frontend"]["extraPodSpec"]["mainContainer"]["image"] = image
    domains = []
    engines = {}
    for config in configs:
        part = PARTS[config.intent.role]
        services[part] = _worker(config, f"{name}-engine", image, f"{name}-{part}")
        engines[f"{part}.yaml"] = _Text(config.text)
        if config.intent.nvlink_joins_nodes:
            domains.append(_compute_domain(f"{name}-{part}"))
    config_map = _object("v1", "ConfigMap", f"{name}-engine", {"data": engines})
    spec = {"backendFramework": "trtllm", "services": services}
    graph = _object("nvidia.com/v1alpha1", "DynamoGraphDeployment", name, {"spec": spec})
    lines = [whole.first_line(), *NOTES]
    if split:
        lines[0] += " --disaggregated ."
        lines.append(SPLIT)
    comments = "\n".join(lines)
    objects = "---\n".join(map(_dump, [config_map, *domains, graph]))
    return f"{comments}\n{objects}"


CHECKPOINT_REMEDY = (
    f"pass a hub id, or a directory below {WEIGHTS}, which `like` makes known before it is there"
)
NOTES = (
    "# Apply with `kubectl apply -f <this file>` where Dynamo's operator runs. "
    "The claim `model-cache` holds the hub",
    "# cache with target and head; Dynamo's recipes have a job that fills it. "
    "One replica each: scale with `replicas`.",
)
SPLIT = (
    "# The prefill and the decode server carry the same head and hand caches over by themselves."
)


def _image(version: str) -> str:
    """The newest image that carries the engine. Raises UsageError if none is known."""
    carried = dynamo_releases()
    for name, engine in carried.items():
        if Version(engine) == Version(version):
            return f"{IMAGE}:{name}"
    newest, engine = next(iter(carried.items()))
    remedy = f"use `trtllm_version` {engine}, the engine of the newest image known here, "
    remedy += f"{IMAGE}:{newest}, or name an image of your own with `image`"
    raise UsageError(f"no Dynamo release is known that carries TensorRT-LLM {version}", remedy)


def default_image(version: str) -> tuple[str, list[Problem]]:
    """(the image for a release that nobody asked for, problems).

    The newest image, with a warning, if none is known to carry the release.
    """
    newest, *_ = dynamo_releases()
    try:
        return _image(version), []
    except UsageError as error:
        code = "TS-LINT-RELEASE-ASSUMED"
        unknown = Problem(code, "warning", "image", error.message, error.remedy)
        return f"{IMAGE}:{newest}", [unknown]


def _name(intent: Intent) -> str:
    """A name that Kubernetes takes, with the target and whether a head speculates."""
    target = intent.published_as.rpartition("/")[2].lower()
    label = re.sub(r"[^a-z0-9]+", "-", target).strip("-")
    suffix = "eagle" if intent.head else "plain"
    return f"{label[:40].strip('-')}-{suffix}"


def _object(version: str, type_name: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": type_name, "metadata": {"name": name}, **body}


def _template(name: str) -> dict[str, Any]:
    template: dict[str, Any] = copy.deepcopy(read_beside("dynamo.yaml")[name])
    return template


def _compute_domain(name: str) -> dict[str, Any]:
    """A ComputeDomain that nodes join when their pods ask for its channel (numNodes 0)."""
    domain = _template("compute_domain")
    domain["metadata"]["name"] = name
    domain["spec"]["channel"]["resourceClaimTemplate"]["name"] = f"{name}-channel"
    return domain


def _worker(config: EngineConfig, config_map: str, image: str, name: str) -> dict[str, Any]:
    intent = config.intent
    part = PARTS[intent.role]
    service = _template("worker")
    pod = service["extraPodSpec"]
    container = pod["mainContainer"]
    container["image"] = image
    container["args"] = _arguments(config, f"{CONFIG}/{part}.yaml")
    pod["volumes"][1]["configMap"]["name"] = config_map
    # as in our chart: loading passes through it
    shared_gib = checkpoint_gib(intent) * 7 // 6
    service["sharedMemory"]["size"] = f"{shared_gib}Gi"
    service["resources"]["limits"]["gpu"] = str(intent.gpus_per_node)
    if intent.role is not None:
        service["subComponentType"] = part
    if intent.nodes > 1:
        service["multinode"] = {"nodeCount": intent.nodes}
    if intent.nvlink_joins_nodes:
        pod["resourceClaims"] = [{"name": CHANNEL, "resourceClaimTemplateName": f"{name}-channel"}]
        service["resources"]["claims"] = [{"name": CHANNEL}]
    return service


def _arguments(config: EngineConfig, path: str) -> list[str]:
    """Options of `dynamo.trtllm`. Trust in the target's code overrides an engine argument."""
    intent = config.intent
    words = config.argv
    settings = intent.settings_in_argv()
    options: dict[str, Any] = {
        "--model-path": engine_path(intent.target, CACHES["dynamo"]),
        "--served-model-name": intent.published_as,
        "--extra-engine-args": path,
    }
    for flag, engine_flag in dynamo_options().items():
        value = words[words.index(engine_flag) + 1] if engine_flag in words else None
        options.setdefault(flag, settings.get(engine_flag.removeprefix("--"), value))
    if intent.nodes > 1:
        options["--gpus-per-node"] = intent.gpus_per_node
    if intent.role is not None:
        options["--disaggregation-mode"] = PARTS[intent.role]
    if intent.trust_remote_code:
        options["--override-engine-args"] = json.dumps({"trust_remote_code": True})
    arguments = []
    for flag, value in options.items():
        if value is not None:
            arguments += [flag, str(value)]
    return arguments
