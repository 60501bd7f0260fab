"""Policies against the published exclude list and against the tensors that they leave alone."""

import json
from dataclasses import replace

import pytest

from tests.json_files import read_json
from tests.package_copy import copy_package, run_copy, touched
from tests.tiny import make_target, target_config, text_config
from trtspec.checkpoint.published import catalogue
from trtspec.families.kimi_k2 import KIMI_K2
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import default_policy, load_policy
from trtspec.quant.run import quantize_checkpoint
from trtspec.report import OutputOptions
from trtspec.specs import ModelSpec

NAMES = ["k2.5", "k2.6", "k2.7-code"]


def kimi_spec(layers: int = 61, nested: bool = True) -> ModelSpec:
    return ModelSpec.from_config(
        target_config(text_config(layers=layers, hidden=64, experts=4), nested=nested)
    )


@pytest.mark.parametrize(("name", "count"), zip(NAMES, (64, 124, 125), strict=True))
def test_counts_of_the_published_lists(name, count):
    patterns = load_policy(name).exclude_patterns(kimi_spec())
    assert len(patterns) == len(set(patterns)) == count
    assert patterns == sorted(patterns)


def test_k25_list_is_the_published_one(upstream_data):
    published = read_json(upstream_data / "model_configs/nvidia--Kimi-K2.5-NVFP4_config.json")
    spec = ModelSpec.from_config(published)
    assert load_policy("k2.5").exclude_patterns(spec) == published["quantization_config"]["ignore"]


def test_text_only_models_have_no_prefix_and_no_vision():
    patterns = load_policy("k2.5").exclude_patterns(kimi_spec(3, nested=False))
    assert patterns == ["lm_head", *(f"model.layers.{layer}.self_attn*" for layer in range(3))]


def test_a_pattern_of_a_dense_layer_never_reaches_another_layer():
    text = text_config(layers=12, hidden=64, experts=4) | {"first_k_dense_replace": 2}
    patterns = load_policy("k2.6").exclude_patterns(
        ModelSpec.from_config(target_config(text, nested=True))
    )
    dense = [pattern for pattern in patterns if pattern.endswith(("layers.0*", "layers.1.*"))]
    assert dense == ["language_model.model.layers.0*", "language_model.model.layers.1.*"]


RELEASES = [(False, (), "k2.5"), (True, (), "k2.5"), (True, (258,), "k2.6")]


@pytest.mark.parametrize(("nested", "ends", "expected"), RELEASES)
def test_the_default_follows_from_the_config_and_never_from_the_path(nested, ends, expected):
    spec = replace(kimi_spec(2, nested), eos_token_ids=ends)
    names = ("Kimi-K2.6", "models--x--Kimi-K2.7-Code", "someone/Kimi-K2.5")
    assert {default_policy(spec, name).name for name in names} == {expected}


def test_a_published_release_has_its_policy():
    """K2.7-Code has the config of K2.6: its id tells them apart."""
    for name, record in catalogue().targets.items():
        policy = default_policy(ModelSpec.from_config(record.config), name).name
        assert policy == next((known for known in NAMES if known[1:4] in name), "k2.5")


def test_the_scales_are_the_publishers():
    """Scales are those of ModelOpt 0.48's recipes of these names.

    They are mse with fp8_scale_sweep, and max with input amax pinned to 2688.
    """
    chosen = {
        name: (load_policy(name).weight_scales, load_policy(name).input_scales) for name in NAMES
    }
    assert chosen == {
        "k2.5": ("max", "calibrated"),
        "k2.6": ("mse", "calibrated"),
        "k2.7-code": ("max", "one"),
    }
    assert all(load_policy(name).source and load_policy(name).modelopt for name in NAMES)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("k2.7-code", {}, []),
        ("k2.6", {}, ["activation scales"]),
        ("k2.6", {"weight_scales": "max"}, ["weight scales", "activation scales"]),
        ("k2.7-code", {"weight_scales": "mse", "kv_cache": None}, ["weight scales", "KV cache"]),
    ],
)
def test_what_is_done_otherwise_is_honoured_and_named(
    tmp_path, name, options, named, out, new_target
):
    source = new_target(layers=2)
    chosen = ConversionOptions(**options)
    plan = quantize_checkpoint(source, out, load_policy(name), chosen, OutputOptions(dry_run=True))
    assert plan.weight_scales == options.get("weight_scales", load_policy(name).weight_scales)
    assert [text.partition(":")[0] for text in plan.deviations] == named
    done = quantize_checkpoint(source, out, load_policy(name), chosen)
    card = (tmp_path / "out/README.md").read_text()
    assert done.deviations == plan.deviations and all(text in card for text in plan.deviations)
    assert load_policy(name).recipe in card and "0.48.0rc1" in card


def test_adding_a_policy_is_a_row_of_data(tmp_path, out):
    """A row adds a policy to a copy: offered, recognised by its family, written into the card."""
    copy = copy_package(tmp_path)
    with (copy / "data/policies.yaml").open("a") as stream:
        stream.write(
            "\n  k2.8:\n    summary: shared experts only\n    source: someone/Kimi-K2.8-NVFP4\n"
            "    releases: []\n    weight_scales: mse\n    input_scales: one\n"
            '    quantize: [shared experts]\n    exclude: ["{prefix}lm_head"]\n'
        )
    assert touched(copy) == ["data/policies.yaml"]
    source = make_target(tmp_path / "in", layers=2)
    words = ("quantize", source, "-o", out, "--policy", "k2.8", "--json")
    found = json.loads(run_copy(copy, "-m", "trtspec", *words))
    assert (found["policy"], found["weight_scales"], found["quantized"], found["deviations"]) == (
        "k2.8",
        "mse",
        3,
        [],
    )
    assert "someone/Kimi-K2.8-NVFP4" in (tmp_path / "out/README.md").read_text()


def test_partners_that_share_a_scale():
    assert KIMI_K2.partners("a.mlp.experts.0.gate_proj") == ["a.mlp.experts.0.up_proj"]
    assert KIMI_K2.partners("a.self_attn.kv_a_proj_with_mqa") == ["a.self_attn.q_a_proj"]
    assert KIMI_K2.partners("a.mlp.down_proj") == []
