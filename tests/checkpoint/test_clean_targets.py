"""Checkpoints as published have no finding above info, which users would learn to ignore."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

from tests.json_files import read_json, write_json
from tests.tiny import make_target, quantized, read_tensors, write_shards
from tests.tiny_formats import hf_quant_config
from trtspec.checkpoint.describe import describe
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.published import catalogue
from trtspec.checkpoint.target_problems import require_target
from trtspec.data_files import kimi_nano_dir

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
VISION_SIZES = (
    "mm_hidden_size",
    "vt_hidden_size",
    "vt_intermediate_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
)


def scaled_down(config: dict[str, Any], tiny: dict[str, Any]) -> dict[str, Any]:
    """A published config.json with the sizes of a tiny model, every other word as published."""
    result = copy.deepcopy(config)
    small = tiny.get("text_config", tiny)
    text = result.get("text_config", result)
    text |= {key: small[key] for key in SIZES}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if "text_config" in result and key in result:
            result[key] = (
                [small[key]] if key == "eos_token_id" else small[key]
            )  # a list of one says the same
    if "media_placeholder_token_id" in result:
        result["media_placeholder_token_id"] = tiny["media_placeholder_token_id"]
    if "vision_config" in result:
        result["vision_config"] |= {
            "text_hidden_size": small["hidden_size"],
            "vt_num_hidden_layers": 1,
            **{key: tiny["vision_config"][key] for key in VISION_SIZES},
        }
    return result


def publish(name: str, directory: Path, shards: int) -> Path:
    """A small checkpoint in the words and the layout of the published one."""
    record = catalogue().targets[name]
    nested = "text_config" in record.config
    plain = make_target(
        directory.parent / "plain", nested=nested, layers=3, shards=1, vision=nested
    )
    path = make_target(
        directory, format=record.format, nested=nested, layers=3, shards=1, vision=nested
    )  # fmt: skip
    tensors, bf16 = read_tensors(path), read_tensors(plain)
    config = scaled_down(record.config, read_json(path / "config.json"))
    block = config.get("quantization_config", {})
    if "hf_quant_config.json" in [file.name for file in path.iterdir()]:
        unpack_excluded(tensors, bf16, block["ignore"])
        block.setdefault("producer", {"name": "modelopt", "version": "0.41.0"})
        write_json(path / "hf_quant_config.json", hf_quant_config(block))
    (path / "model.safetensors").unlink()
    write_shards(path, tensors, shards)
    write_json(path / "config.json", config)
    for value in {
        **config.get("auto_map", {}),
        **config.get("text_config", {}).get("auto_map", {}),
    }.values():
        (path / f"{value.split('.')[0]}.py").write_text("# remote code\n")
    return path


def unpack_excluded(tensors: dict[str, Any], bf16: dict[str, Any], ignore: list[str]) -> None:
    from fnmatch import fnmatchcase

    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        if any(fnmatchcase(module, pattern) for pattern in ignore):
            for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                tensors.pop(f"{module}.{suffix}")
            tensors[f"{module}.weight"] = bf16[f"{module}.weight"]


def above_info(path: Path, sample: int | None = 0) -> list[str]:
    found = describe(resolve(str(path)), sample=sample).problems
    return [
        f"{problem.code} {problem.where} {problem.message}"
        for problem in found
        if problem.severity != "info"
    ]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", catalogue().targets)
def test_published_targets(tmp_path: Path, name: str, shards: int) -> None:
    path = publish(name, tmp_path / "it", shards)
    assert not above_info(path)
    require_target(path)


@pytest.mark.parametrize("format", ["bf16", "fp8-block", "int4", "nvfp4"])
def test_the_shipped_model(tmp_path: Path, format: str) -> None:
    """The shipped model is clean in every format.

    INT4 has groups of 32: there experts of 48 are experts of 64, of which 16 rows and columns are
    zero.
    """
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(kimi_nano_dir() / name, tmp_path)
    config, tensors = read_json(kimi_nano_dir() / "config.json"), read_tensors(kimi_nano_dir())
    if format == "int4":
        config["text_config"]["moe_intermediate_size"] = 64
        for name, tensor in tensors.items():
            if 48 in tensor.shape:
                rows, columns = tensor.shape
                tensors[name] = functional.pad(tensor, (0, -columns % 64, 0, -rows % 64))
    write_shards(tmp_path, quantized(tmp_path, config, tensors, format), 1)
    assert not above_info(tmp_path)


def test_shard_names_of_other_widths(tmp_path: Path) -> None:
    """Kimi-K2-Instruct counts without zeros, Kimi-K2.5 with six digits behind `of`."""
    path = make_target(tmp_path, layers=3, shards=2)
    index = read_json(path / "model.safetensors.index.json")
    for number in (1, 2):
        old, new = f"model-{number:05d}-of-00002.safetensors", f"model-{number}-of-2.safetensors"
        (path / old).rename(path / new)
        index["weight_map"] = {
            name: new if file == old else file for name, file in index["weight_map"].items()
        }
    write_json(path / "model.safetensors.index.json", index)
    assert not above_info(path)
