"""The configs of an NVFP4 checkpoint, as published ones have them, and its model card."""

from __future__ import annotations

import copy
import shlex
from typing import Any

from trtspec.checkpoint.headers import HF_QUANT_NAME
from trtspec.data_files import DATA
from trtspec.errors import Problem
from trtspec.formats import NVFP4_BLOCK
from trtspec.quant.plan import Conversion
from trtspec.quant.policy import KV_CACHES, WEIGHT_SCALES, source_name
from trtspec.report import write_json

# The layout is ModelOpt's, version for version; loaders look for this name. provenance.json says who wrote the file.
PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def write_configs(conversion: Conversion) -> None:
    """hf_quant_config.json, which TensorRT-LLM reads first, then the source's config.json with its own quantization
    removed, also inside text_config, and ours on top.

    config.json comes last: a directory without it is no checkpoint to any loader.
    """
    exclude, kv_cache = conversion.policy.exclude_patterns(conversion.spec), conversion.options.kv_cache
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,  # the scale-free cast: no scale tensors
        "group_size": NVFP4_BLOCK,
        "exclude_modules": exclude,
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    group = {"input_activations": numbers, "weights": dict(numbers), "targets": ["Linear"]}
    block: dict[str, Any] = {"config_groups": {"group_0": group}, "ignore": exclude, "quant_algo": "NVFP4"}
    if kv_cache == "fp8":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    config = copy.deepcopy(conversion.checkpoint.config)
    config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    config["quantization_config"] = block | {"producer": PRODUCER, "quant_method": "modelopt"}
    write_json(conversion.output / HF_QUANT_NAME, {"producer": PRODUCER, "quantization": quantization})
    write_json(conversion.output / "config.json", config)


def model_card(conversion: Conversion, facts: dict[str, Any], classes: dict[str, Any], found: list[Problem]) -> str:
    """README.md of the output; nothing in it depends on when or how fast the conversion ran.

    `facts` are the counts and sizes of the card, `classes` the errors by class of linear, `found` what is wrong
    with the bytes of the source.
    """
    spec, policy, name = conversion.spec, conversion.policy, source_name(conversion.checkpoint.path)
    rows = [
        f"| {name} | {entry['tensors']:,} | {entry['relative_error']:.4f} | {entry['zero_blocks']:,} |"
        for name, entry in sorted(classes.items())
    ]
    lines = [f"- {one.message} (`{one.code}`)\n" for one in found]
    published = [f"- the policy is that of {policy.source}"] if policy.source else []
    if policy.recipe:
        published.append(f"- recipe of ModelOpt: `modelopt_recipes/{policy.recipe}.yaml`")
    if policy.modelopt:
        same = ", ".join(policy.modelopt)
        published.append(f"- the bytes equal those of ModelOpt's export for the same amax: {same}")
    published += [f"- **otherwise than published**: {text}" for text in conversion.deviations]
    template = (DATA / "nvfp4_card.md").read_text(encoding="utf-8")
    return template.format(
        **facts,
        base=name,
        title=name.rpartition("/")[2],
        output=shlex.quote(conversion.output.name),
        policy=policy.name,
        summary=policy.summary,
        published="\n".join(published) or "- the policy is the user's own",
        kv=KV_CACHES[conversion.options.kv_cache or "none"],
        scales=conversion.scales.description,
        weight_scales=WEIGHT_SCALES[conversion.weight_scales],
        format=spec.quant.format.upper(),
        architecture=spec.architecture,
        layers=spec.num_hidden_layers,
        errors="\n".join(rows),
        found="\n## Found in the source\n\n" + "".join(lines) if lines else "",
    )
