"""An engine configuration for a cluster: values of our Helm chart, or a Dynamo deployment.

Both formats have the engine's YAML as text, byte for byte as `--format yaml` writes it, and the
sizes as options. The objects of a Dynamo deployment follow ai-dynamo/dynamo 1e4f6939,
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
from trtspec.planning.memory import BF16_BYTES, checkpoint_bytes, head_parameters
from trtspec.trtllm.build import EngineConfig
from trtspec.trtllm.deployment import dynamo_options, dynamo_releases
from trtspec.trtllm.document import YamlDumper
from trtspec.trtllm.intent import CACHES, WEIGHTS, Intent, Role
from trtspec.trtllm.schema import read_beside

IMAGE = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime"
CONFIG = "/config"
CHANNEL = "compute-domain-channel"
# Dynamo's words for a whole server and for the roles of a disaggregated one
PARTS: dict[Role | None, str] = {None: "agg", "context": "prefill", "generation": "decode"}


class _Text(str):
    """Text that YAML writes as a literal block, so that the engine's YAML keeps its comments."""


YamlDumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def _dump(value: dict[str, Any]) -> str:
    """YAML of a mapping, with keys in their order and literal blocks for `_Text`."""
    return yaml.dump(value, Dumper=YamlDumper, sort_keys=False, width=10**6)


def helm_values(*configs: EngineConfig, quantize_from: str | None = None) -> str:
    """Values of the chart docker/helm/trtspec for a whole server, or for disaggregated servers.

    Files of one server each go together: `helm -f context.yaml -f generation.yaml`. Sizes and trust
    in the target's code are on the first line of each engine file, where `trtspec serve` reads
    them.

    Raises UsageError for a front.

    Args:
        configs: engine files of the servers.
        quantize_from: checkpoint that a Job of the chart quantizes into the target's directory.
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
    if intent.role is None:  # one whole server
        values |= _server(configs[0])
    else:
        values["disaggregated"] = {str(config.intent.role): _server(config) for config in configs}
    first_line = intent.first_line()
    if len(configs) > 1:  # one command writes the values of all servers
        first_line = f"{replace(intent, role=None).first_line()} --disaggregated ."
    return f"{first_line}\n{_dump(values)}"


def _server(config: EngineConfig) -> dict[str, Any]:
    """Chart values of one server: its nodes, GPUs and engine file."""
    intent = config.intent
    return {
        "nodes": intent.nodes,
        "gpusPerNode": intent.gpus_per_node,
        "engineConfig": _Text(config.text),
    }


def _quantize(source: str, target_gib: int) -> dict[str, Any]:
    """Chart values of the Job that quantizes `source`, and of a volume for source and result.

    `target_gib`: size of the result in GiB. The volume is a tenth larger than both checkpoints.
    """
    source_bytes = checkpoint_bytes(find_target(source).spec)
    source_gib = -(-source_bytes // 2**30)
    both_gib = source_gib + target_gib
    claim_gib = -(-both_gib * 11 // 10)  # a tenth more, rounded up
    return {
        "quantize": {"enabled": True, "source": source, "sourceGiB": source_gib},
        "cache": {"size": f"{claim_gib}Gi"},
    }


def checkpoint_gib(intent: Intent) -> int:
    """Size of the target and head checkpoints together, in GiB rounded up, from their shapes."""
    total = checkpoint_bytes(find_target(intent.target, intent.like).spec)
    if intent.head is not None:
        spec = load_head(intent.head).spec
        # the file may have an embedding of its own, which head_parameters leaves out
        parameters = head_parameters(spec) + spec.vocab_size * spec.hidden_size
        total += BF16_BYTES * parameters
    return -(-total // 2**30)


def dynamo(configs: list[EngineConfig], image: str | None = None) -> str:
    """YAML of a Dynamo deployment: a ConfigMap, ComputeDomains, and the DynamoGraphDeployment.

    The ConfigMap has the engine YAML of each server. A server has a ComputeDomain if ranks of
    several trays share NVLink. The weights are on the claim `model-cache`, as in Dynamo's recipes.

    Raises UsageError for a checkpoint outside the claim. Raises UsageError for an engine version
    that no known Dynamo release has, if no `image` is named.
    """
    is_disaggregated = len(configs) > 1
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
    if is_disaggregated:
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
    """Newest image of Dynamo that has an engine version. Raises UsageError if no image is known."""
    carried = dynamo_releases()
    for name, engine in carried.items():
        if Version(engine) == Version(version):
            return f"{IMAGE}:{name}"
    newest, engine = next(iter(carried.items()))
    remedy = f"use `trtllm_version` {engine}, the engine of the newest image known here, "
    remedy += f"{IMAGE}:{newest}, or name an image of your own with `image`"
    raise UsageError(f"no Dynamo release is known that carries TensorRT-LLM {version}", remedy)


def default_image(version: str) -> tuple[str, list[Problem]]:
    """Returns the image of Dynamo for a release that the user did not choose, and problems.

    If no image is known to have the release, returns the newest image and a warning.
    """
    newest, *_ = dynamo_releases()
    try:
        return _image(version), []
    except UsageError as error:
        code = "TS-LINT-RELEASE-ASSUMED"
        unknown = Problem(code, "warning", "image", error.message, error.remedy)
        return f"{IMAGE}:{newest}", [unknown]


def _name(intent: Intent) -> str:
    """Name of the deployment for Kubernetes, with the target and whether a head speculates."""
    target = intent.published_as.rpartition("/")[2].lower()
    label = re.sub(r"[^a-z0-9]+", "-", target).strip("-")
    suffix = "eagle" if intent.head else "plain"
    return f"{label[:40].strip('-')}-{suffix}"  # with suffixes, at most Kubernetes' 63 characters


def _object(version: str, type_name: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes object. `version`: its API version. `body`: its fields beside the name."""
    return {"apiVersion": version, "kind": type_name, "metadata": {"name": name}, **body}


def _template(name: str) -> dict[str, Any]:
    """Copy of a template in dynamo.yaml."""
    template: dict[str, Any] = copy.deepcopy(read_beside("dynamo.yaml")[name])
    return template


def _compute_domain(name: str) -> dict[str, Any]:
    """ComputeDomain that nodes join when their pods ask for its channel (numNodes 0)."""
    domain = _template("compute_domain")
    domain["metadata"]["name"] = name
    domain["spec"]["channel"]["resourceClaimTemplate"]["name"] = f"{name}-channel"
    return domain


def _worker(config: EngineConfig, config_map: str, image: str, name: str) -> dict[str, Any]:
    """Dynamo's service that runs one server.

    Args:
        config: engine file of the server.
        config_map: name of the ConfigMap with the engine file.
        name: name of the server, which its ComputeDomain has.
    """
    intent = config.intent
    part = PARTS[intent.role]
    service = _template("worker")
    pod = service["extraPodSpec"]
    container = pod["mainContainer"]
    container["image"] = image
    container["args"] = _arguments(config, f"{CONFIG}/{part}.yaml")
    pod["volumes"][1]["configMap"]["name"] = config_map
    # as in our chart, because loading passes through the shared memory
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
    """Options of `dynamo.trtllm` for one server. `path`: path of its engine file in the pod."""
    intent = config.intent
    words = config.argv
    settings = intent.settings_in_argv()
    options: dict[str, Any] = {
        "--model-path": engine_path(intent.target, CACHES["dynamo"]),
        "--served-model-name": intent.published_as,
        "--extra-engine-args": path,
    }
    # options of trtllm-serve's command by Dynamo's names, which do not replace the three above
    for flag, engine_flag in dynamo_options().items():
        value = words[words.index(engine_flag) + 1] if engine_flag in words else None
        options.setdefault(flag, settings.get(engine_flag.removeprefix("--"), value))
    if intent.nodes > 1:
        options["--gpus-per-node"] = intent.gpus_per_node
    if intent.role is not None:
        options["--disaggregation-mode"] = PARTS[intent.role]
    if intent.trust_remote_code:  # the worker has no option for it
        options["--override-engine-args"] = json.dumps({"trust_remote_code": True})
    arguments = []
    for flag, value in options.items():
        if value is not None:
            arguments += [flag, str(value)]
    return arguments
