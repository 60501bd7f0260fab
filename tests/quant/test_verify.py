"""`compare` finds what can be wrong with a converted checkpoint, each kind on a checkpoint damaged that way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_head, make_target
from trtspec.quant.modelopt import packed_by_modelopt
from trtspec.quant.policy import load_policy
from trtspec.quant.streaming import quantize_checkpoint
from trtspec.quant.verify import compare

MODULE = "language_model.model.layers.1.mlp.experts.2.down_proj"
NORM = "language_model.model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    source = make_target(root / "in", format="int4", layers=2, shards=1, vision=True)
    quantize_checkpoint(source, root / "out", load_policy("k2.5"))
    return source, root / "out"


def codes(out: Path, source: Path, sample: int = 0) -> set[str]:
    return {problem.code for problem in compare(out, source, sample)["problems"]}


@pytest.mark.parametrize("format", ["bf16", "int4", "fp8-block"])
@pytest.mark.parametrize("policy", ["k2.5", "k2.6", "k2.7-code"])
def test_a_good_conversion_has_no_problem(tmp_path, format, policy):
    source = make_target(tmp_path / "in", format=format, layers=3, vision=True)
    quantize_checkpoint(source, tmp_path / "out", load_policy(policy))
    report = compare(tmp_path / "out", source, 0)
    assert report["problems"] == [] and report["compared"] == report["tensors"]
    assert all(0.05 < entry["relative_error"] < 0.12 for entry in report["classes"].values())
    assert compare(tmp_path / "out", source, 10)["compared"] == 10


def test_error_by_layer_and_modelopts_bytes(pair):
    source, good = pair
    report = compare(good, source, 0, packed_by_modelopt)
    assert report["problems"] == [] and report["packed_alike"] == 3 + 5 * 3
    assert list(report["layers"]) == ["0", "1"]
    assert [entry["tensors"] for entry in report["layers"].values()] == [3, 15]
    assert all(0.05 < entry["relative_error"] <= entry["worst"] < 0.12 for entry in report["layers"].values())


def test_other_codes_than_modelopts_are_found(pair, tmp_path):
    source, good = pair
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    tensors = load_file(good / "model.safetensors")
    tensors[f"{MODULE}.weight"][0, 0] ^= 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = compare(tmp_path, source, 0, packed_by_modelopt)["problems"]
    assert [(problem.code, problem.where) for problem in found] == [("TS-QUANT-BYTES", f"{MODULE}.weight")]


def damage(tensors: dict[str, torch.Tensor], case: str) -> None:
    if case == "TS-QUANT-TENSOR-LOST":
        del tensors[NORM]
    elif case == "TS-QUANT-TENSOR-NEW":
        tensors["language_model.model.extra.weight"] = torch.ones(2)
    elif case == "TS-QUANT-PART-MISSING":
        del tensors[f"{MODULE}.input_scale"]
    elif case == "TS-QUANT-DTYPE":
        tensors[NORM] = tensors[NORM].float()
    elif case == "TS-QUANT-SHAPE":
        tensors[f"{MODULE}.weight_scale"] = tensors[f"{MODULE}.weight_scale"][:, :1].contiguous()
    elif case == "TS-QUANT-CHANGED":
        tensors[NORM][3] += 1
    elif case == "TS-QUANT-ERROR":
        tensors[f"{MODULE}.weight_scale_2"] *= 1.5
    elif case == "nan scale":
        tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[5, 1] = 0xFF
    elif case == "swapped nibbles":
        packed = tensors[f"{MODULE}.weight"]
        tensors[f"{MODULE}.weight"] = (packed >> 4) | (packed << 4)


@pytest.mark.parametrize(
    ("case", "code"),
    [(code, code) for code in ("TENSOR-LOST", "TENSOR-NEW", "PART-MISSING", "DTYPE", "SHAPE", "CHANGED", "ERROR")]
    + [("nan scale", "BAD-SCALE"), ("swapped nibbles", "ERROR")],
)
def test_each_damage_is_found(pair, tmp_path, case, code):
    source, good = pair
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    tensors = load_file(good / "model.safetensors")
    damage(tensors, case if " " in case else f"TS-QUANT-{case}")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert f"TS-QUANT-{code}" in codes(tmp_path, source)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("TS-QUANT-EXCLUDED", lambda ignore: [*ignore, "language_model.model.layers.1.mlp.experts*"]),
        ("TS-QUANT-NOT-EXCLUDED", lambda ignore: [entry for entry in ignore if "layers.1" not in entry]),
    ],
)
def test_the_exclude_list_must_fit_the_tensors(pair, tmp_path, code, change):
    source, good = pair
    config = json.loads((good / "config.json").read_text())
    config["quantization_config"]["ignore"] = change(config["quantization_config"]["ignore"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(good / "model.safetensors")
    assert codes(tmp_path, source, 1) == {code}


def test_another_source_is_noticed(pair, tmp_path):
    other = make_target(tmp_path / "other", format="int4", layers=2, shards=1, vision=True, seed=9)
    assert {"TS-QUANT-ERROR", "TS-QUANT-CHANGED"} <= codes(pair[1], other)


def test_two_copies_of_a_head(pair, tmp_path):
    head = make_head(tmp_path / "head", pair[0])
    assert compare(head, head, 0)["problems"] == []
    changed = make_head(tmp_path / "changed", pair[0], seed=1)
    assert codes(changed, head) == {"TS-QUANT-CHANGED"}
