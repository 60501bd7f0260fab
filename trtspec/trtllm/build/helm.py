"""Chart values that carry an engine configuration: the same YAML as text, the options, the image tag, the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from trtspec.errors import UsageError

if TYPE_CHECKING:
    from trtspec.trtllm.build.render import Recipe


class _Text(str):
    """Written as a literal block, so that the engine's YAML keeps its comments and stays readable."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def helm_values(recipe: Recipe) -> str:
    """The keys of docker/helm/trtspec. The path of the configuration is the chart's business and is left out of the
    options. Raises UsageError for one part of a disaggregated deployment, which the chart does not run."""
    intent = recipe.intent
    if intent.role is not None:
        raise UsageError(
            "the chart runs whole servers, not the parts of a disaggregated one",
            "write the YAML and start the parts with `trtspec serve`",
        )
    model: dict[str, Any] = {"target": intent.target, "head": intent.head}
    size = checkpoint_gib(intent.target, intent.head)
    if size is not None:
        model["sizeGiB"] = size
    values: dict[str, Any] = {
        "image": {"tag": intent.version},
        "model": model,
        "nodes": recipe.nodes,
        "gpusPerNode": recipe.gpus_per_node,
    }
    if intent.gpu:
        values["gpuProduct"] = intent.gpu.upper()
    values["server"] = {"args": recipe.argv[2 : recipe.argv.index("--extra_llm_api_options")]}
    values["engineConfig"] = _Text(recipe.text)
    return f"{intent.first_line()} --format helm-values\n" + yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, width=10**6
    )


def checkpoint_gib(target: str, head: str | None) -> int | None:
    """GiB of both checkpoints, rounded up: from the shapes, and of the head with its embedding."""
    from trtspec.planning.weights import checkpoint_bytes, head_weights
    from trtspec.trtllm.names import load_head, load_target

    total = checkpoint_bytes(load_target(target).spec)
    if head is not None:
        spec = load_head(head).spec
        total += head_weights(spec).bytes + 2 * spec.vocab_size * spec.hidden_size
    return -(-total // 2**30)
