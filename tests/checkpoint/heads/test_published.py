"""Heads as they are published, scaled down: `inspect` finds nothing above info in any of them.

Key sets, names and maps are those of the projects' exporters and of published listings; the sizes
are tiny. Two configs are TorchSpec's own files (TRTSPEC_UPSTREAM_DATA), of which only the sizes are
changed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import inspected
from tests.heads.convert.foreign_heads import (
    IDS,
    Change,
    store,
    stored,
    target_embedding,
    write_head,
)
from tests.json_files import read_json

Config = dict[str, Any]
MLA, MHA = {"attention": "mla"}, {"attention": "mha"}
PRUNED = {"draft_vocab": 128}


def as_it_is(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """The layout as its exporter writes it."""


def modelopt_kimi(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """ModelOpt's kimik2 export.

    It has keys of DeepSeek-V3's config class beside the head's, and the rope part's head_dim.
    """
    config |= {
        "head_dim": config["qk_rope_head_dim"],
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 8,
        "ep_size": 1,
        "seq_aux": True,
    }
    config.pop("draft_vocab_size", None)


def modelopt_042(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Until 0.42 the layer was called midlayer."""
    modelopt_kimi(config, tensors)
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def without_lm_head(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Downloads of NVIDIA's K2.6 head from before its lm_head was added."""
    modelopt_kimi(config, tensors)
    del tensors["lm_head.weight"]


def transformers_5(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """A config that transformers 5 saved, with the old keys mirrored as SpecForge does."""
    config["dtype"] = config.pop("torch_dtype")
    config["transformers_version"] = "5.14.1"


def speculators_saved(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """What speculators' config class saves: nulls for what it does not know."""
    config |= {"target_layer_ids": None, "embed_requires_grad": False, "norm_before_fc": False}
    layer = config["transformer_layer_config"]
    del layer["rope_theta"], layer["rope_scaling"]


def upstream(name: str) -> Change:
    """TorchSpec's own config file with the sizes and layer ids of the tiny head."""

    def change(config: Config, tensors: dict[str, torch.Tensor]) -> None:
        text = read_json(Path(change.place, "draft_configs", name))  # type: ignore[attr-defined]
        sizes = {
            key: config[key]
            for key in text
            if key.endswith(("_size", "_dim", "_rank", "_heads", "_token_id"))
        }
        sizes["rope_scaling"] = (
            text["rope_scaling"]
            | {
                key: config["rope_scaling"][key]
                for key in ("factor", "original_max_position_embeddings")
            }
            if config.get("rope_scaling")
            else text["rope_scaling"]
        )
        if "eagle_config" in text:
            sizes["eagle_config"] = text["eagle_config"] | {IDS: config["eagle_config"][IDS]}
        config.clear()
        config |= text | sizes

    return change


STYLES: list[tuple[str, str, Change, dict[str, Any]]] = [
    ("nvidia Kimi-K2.5-Eagle3, ModelOpt 0.42", "modelopt", modelopt_042, MLA),
    ("nvidia Kimi-K2.6-Eagle3, ModelOpt 0.44", "modelopt", modelopt_kimi, MLA),
    ("nvidia Kimi-K2.6-Eagle3 without lm_head", "modelopt", without_lm_head, MLA),
    ("nvidia Kimi-K2-Thinking-Eagle3", "modelopt", modelopt_kimi, MLA),
    (
        "lightseek kimi-k2.5-eagle3-mla",
        "torchspec",
        upstream("torchspec--kimi_k25_eagle3_mla.json"),
        MLA,
    ),
    ("lightseek kimi-k2.6-eagle3-mla for vLLM", "vllm", as_it_is, MLA),
    ("lightseek kimi-k2.6-eagle3.1-mla", "torchspec", as_it_is, MLA | {"eagle": "3.1"}),
    ("lightseek kimi-k2.5-eagle3", "torchspec", upstream("torchspec--kimi_k25_eagle3.json"), MHA),
    ("SpecForge, pruned", "specforge", as_it_is, MHA | PRUNED),
    ("SpecForge, transformers 5", "specforge", transformers_5, MHA | PRUNED),
    ("SpecForge, EAGLE-3.1", "specforge", as_it_is, MHA | {"eagle": "3.1"}),
    ("SafeAILab", "safeailab", as_it_is, MHA | PRUNED),
    ("TorchSpec, pruned", "torchspec", as_it_is, MHA | PRUNED),
    ("speculators", "speculators", speculators_saved, MHA | PRUNED),
    ("speculators, EAGLE-3.1", "speculators", as_it_is, MHA | {"eagle": "3.1"}),
    ("ModelOpt, Llama", "modelopt", as_it_is, MHA),
    ("ModelOpt, Llama, pruned", "modelopt", as_it_is, MHA | PRUNED),
    ("SGLang", "sglang", as_it_is, MLA | PRUNED),
    ("vLLM, EAGLE-3.1, pruned", "vllm", as_it_is, MHA | {"eagle": "3.1"} | PRUNED),
]


@pytest.mark.parametrize(
    ("name", "dialect", "change", "kind"), STYLES, ids=[style[0] for style in STYLES]
)
def test_published_heads_have_nothing_above_info(
    tmp_path: Path,
    target_dir: Path,
    request: Any,
    name: str,
    dialect: str,
    change: Change,
    kind: dict[str, Any],
) -> None:
    path = write_head(tmp_path / "head", target_dir, dialect, **kind)
    config, tensors = stored(path)
    if change.__qualname__.startswith("upstream"):
        change.place = request.getfixturevalue("upstream_data")  # type: ignore[attr-defined]
    change(config, tensors)
    assert "embed_tokens.weight" not in tensors or torch.equal(
        tensors["embed_tokens.weight"], target_embedding(target_dir)
    )
    store(path, config, tensors)
    problems = inspected(str(path), str(target_dir), sample=0).problems
    assert [(one.code, one.message) for one in problems if one.severity != "info"] == []
