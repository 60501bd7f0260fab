"""Policies against the published exclude list and against the tensors that they leave alone."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from tests.tiny import make_target, target_config, text_config
from trtspec.checkpoint.headers import Checkpoint
from trtspec.errors import UsageError
from trtspec.quant.policy import default_policy, load_policy, shared_partners
from trtspec.specs import ModelSpec

NAMES = ["k2.5", "k2.6", "k2.7-code"]


def kimi_spec(layers: int = 61, nested: bool = True) -> ModelSpec:
    return ModelSpec.from_config(target_config(text_config(layers=layers, hidden=64, experts=4), nested=nested))


@pytest.mark.parametrize(("name", "count"), zip(NAMES, (64, 124, 125), strict=True))
def test_counts_of_the_published_lists(name, count):
    patterns = load_policy(name).exclude_patterns(kimi_spec())
    assert len(patterns) == len(set(patterns)) == count
    assert patterns == sorted(patterns)


def test_k25_list_is_the_published_one(upstream_data):
    published = json.loads((upstream_data / "model_configs/nvidia--Kimi-K2.5-NVFP4_config.json").read_text())
    spec = ModelSpec.from_config(published)
    assert load_policy("k2.5").exclude_patterns(spec) == published["quantization_config"]["ignore"]


def test_text_only_models_have_no_prefix_and_no_vision():
    patterns = load_policy("k2.5").exclude_patterns(kimi_spec(3, nested=False))
    assert patterns == ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(3))]


def test_a_pattern_of_a_dense_layer_never_reaches_another_layer(tmp_path):
    text = text_config(layers=12, hidden=64, experts=4) | {"first_k_dense_replace": 2}
    patterns = load_policy("k2.6").exclude_patterns(ModelSpec.from_config(target_config(text, nested=True)))
    dense = [pattern for pattern in patterns if pattern.endswith(("layers.0*", "layers.1.*"))]
    assert dense == ["language_model.model.layers.0*", "language_model.model.layers.1.*"]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_and_excluded_never_overlap(tmp_path, name, nested):
    checkpoint = Checkpoint.open(make_target(tmp_path, layers=3, nested=nested, vision=nested))
    policy, spec = load_policy(name), ModelSpec.from_config(checkpoint.config)
    patterns = policy.exclude_patterns(spec)
    chosen = {tensor for tensor in checkpoint.tensors if policy.quantizes(tensor)}
    experts = {tensor for tensor in checkpoint.tensors if ".mlp.experts." in tensor}
    assert chosen == experts if name != "k2.5" else experts < chosen
    assert all(tensor.endswith("_proj.weight") and ".mlp." in tensor for tensor in chosen)
    for tensor in chosen:
        module = tensor.removesuffix(".weight")
        assert not any(fnmatchcase(module, pattern) for pattern in patterns), module


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("moonshotai/Kimi-K2.5", "k2.5"),
        ("/data/Kimi-K2.6", "k2.6"),
        ("moonshotai/Kimi-K2.7-Code", "k2.7-code"),
        ("moonshotai/Kimi-K2-Thinking", "k2.5"),
        ("moonshotai/Kimi-K2-Instruct-0905", "k2.5"),
        ("/cache/models--moonshotai--Kimi-K2.5/snapshots/0123abcd", "k2.5"),
        ("/k2.5/old/kimi-k2.6", "k2.6"),
        ("some-finetune", "k2.6"),
    ],
)
def test_default_by_the_name(name, expected):
    assert default_policy(name).name == expected


def test_an_own_policy_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        'summary: one\nquantize: ["model.layers.*.mlp.experts.*.down_proj"]\nexclude: ["{prefix}lm_head"]\n'
    )
    policy = load_policy(str(path))
    assert policy.name == "mine" and policy.quantizes("language_model.model.layers.3.mlp.experts.7.down_proj.weight")
    assert not policy.quantizes("language_model.model.layers.3.mlp.experts.7.up_proj.weight")
    path.write_text("quantize: [a]\n")
    with pytest.raises(UsageError, match="is not a policy"):
        load_policy(str(path))
    with pytest.raises(UsageError, match="neither one of k2.5, k2.6"):
        load_policy("k3")


def test_partners_that_share_a_scale():
    assert shared_partners("a.mlp.experts.0.gate_proj") == ["a.mlp.experts.0.up_proj"]
    assert shared_partners("a.self_attn.kv_a_proj_with_mqa") == ["a.self_attn.q_a_proj"]
    assert shared_partners("a.mlp.down_proj") == []
