"""Kimi-shaped checkpoints small enough for a test: all formats, both namings, heads, tokenizer.

Written without trtspec on purpose: these files stand for what comes from a hub, so they must not
share code with the readers under test. The same seed gives the same underlying BF16 weights in
every format. Tensors are dealt to the shards in turn, which separates all pairs (gate and up,
packed weight and scale), the worst case for a streaming reader.
"""

import base64
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import json_files
from tests.json_files import read_json
from tests.tiny_formats import (
    FP8_CONFIG,
    INT4_CONFIG,
    hf_quant_config,
    nvfp4_config,
    quantize_tensors,
)

VOCAB = 512
RESERVED = 256
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
VISIBLE = (
    11,
    12,
    13,
    14,
    15,
    22,
    23,
)  # tool calls and think tags, which a server must see in the text
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FILES = Path(__file__).with_name("tiny_files")  # published ones, scaled down


def published(name: str) -> dict[str, Any]:
    """A file of FILES."""
    found: dict[str, Any] = read_json(FILES / name)
    return found


def text_config(*, layers: int, hidden: int, experts: int, vocab: int = VOCAB) -> dict[str, Any]:
    """The text part of a published config.json, scaled down; YaRN as in K2.5."""
    base = vocab - RESERVED
    tokens = {
        "bos_token_id": base,
        "eos_token_id": base + 1,
        "pad_token_id": vocab - 1,
        "vocab_size": vocab,
    }
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": max(32, hidden // 2),
    }
    counts = {"n_routed_experts": experts, "num_hidden_layers": layers}
    return published("text_config.json") | tokens | sizes | counts


def target_config(text: dict[str, Any], *, nested: bool) -> dict[str, Any]:
    """Wraps the text part as Kimi-K2.5 does (`nested`), or lays it flat as Kimi-K2-Instruct."""
    if not nested:
        return {key: value for key, value in text.items() if key != "dtype"} | {
            "torch_dtype": "bfloat16"
        }
    whole = published("kimi_k25.json") | {key: text[key] for key in TOKENS}
    whole |= {"media_placeholder_token_id": text["vocab_size"] - RESERVED + 21, "text_config": text}
    whole["vision_config"]["text_hidden_size"] = text["hidden_size"]
    return whole


class _Random:
    """Seeded BF16 weights: matrices keep their input's variance, gains scatter around one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=self.generator) * columns**-0.5).to(
            torch.bfloat16
        )

    def gain(self, width: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(width, generator=self.generator)).to(torch.bfloat16)

    def bias(self, width: int) -> torch.Tensor:
        return 0.05 * torch.randn(width, generator=self.generator)


def _mlp(random: _Random, prefix: str, hidden: int, inner: int) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}gate_proj.weight": random.matrix(inner, hidden),
        f"{prefix}up_proj.weight": random.matrix(inner, hidden),
        f"{prefix}down_proj.weight": random.matrix(hidden, inner),
    }


def _mla(
    random: _Random, prefix: str, config: dict[str, Any], inputs: int
) -> dict[str, torch.Tensor]:
    heads, rope, nope, value = (
        config[key]
        for key in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    return {
        f"{prefix}q_a_proj.weight": random.matrix(q_rank, inputs),
        f"{prefix}q_a_layernorm.weight": random.gain(q_rank),
        f"{prefix}q_b_proj.weight": random.matrix(heads * (nope + rope), q_rank),
        f"{prefix}kv_a_proj_with_mqa.weight": random.matrix(kv_rank + rope, inputs),
        f"{prefix}kv_a_layernorm.weight": random.gain(kv_rank),
        f"{prefix}kv_b_proj.weight": random.matrix(heads * (nope + value), kv_rank),
        f"{prefix}o_proj.weight": random.matrix(config["hidden_size"], heads * value),
    }


def text_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """BF16 tensors of the text model by flat hub names; the correction bias is float32."""
    random, hidden = _Random(seed), config["hidden_size"]
    tensors = {"model.embed_tokens.weight": random.matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = random.gain(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = random.gain(hidden)
        tensors |= _mla(random, f"{prefix}self_attn.", config, hidden)
        if layer < config["first_k_dense_replace"]:
            tensors |= _mlp(random, f"{prefix}mlp.", hidden, config["intermediate_size"])
            continue
        inner = config["moe_intermediate_size"]
        tensors[f"{prefix}mlp.gate.weight"] = random.matrix(config["n_routed_experts"], hidden)
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = random.bias(
            config["n_routed_experts"]
        )
        for expert in range(config["n_routed_experts"]):
            tensors |= _mlp(random, f"{prefix}mlp.experts.{expert}.", hidden, inner)
        tensors |= _mlp(
            random, f"{prefix}mlp.shared_experts.", hidden, inner * config["n_shared_experts"]
        )
    tensors["model.norm.weight"] = random.gain(hidden)
    tensors["lm_head.weight"] = random.matrix(config["vocab_size"], hidden)
    return tensors


def vision_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a published vision tower and projector."""
    random, vision = _Random(seed + 1), config["vision_config"]
    width, inner = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    patch, merged = vision["patch_size"], width * 4
    gains = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    linears = {
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (vision["text_hidden_size"], merged),
    }
    for number in range(vision["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{number}"
        gains += [f"{block}.norm0", f"{block}.norm1"]
        linears |= {
            f"{block}.wqkv": (3 * width, width),
            f"{block}.wo": (width, width),
            f"{block}.mlp.fc0": (inner, width),
            f"{block}.mlp.fc1": (width, inner),
        }
    sides = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    patches = random.matrix(width, 3 * patch * patch).reshape(width, 3, patch, patch)
    tensors = {
        "vision_tower.patch_embed.pos_emb.weight": random.matrix(math.prod(sides), width).reshape(
            *sides, width
        ),
        "vision_tower.patch_embed.proj.weight": patches,
        "vision_tower.patch_embed.proj.bias": random.gain(width),
    }
    for name in gains:
        tensors |= {f"{name}.weight": random.gain(width), f"{name}.bias": random.gain(width)}
    for name, shape in linears.items():
        tensors |= {f"{name}.weight": random.matrix(*shape), f"{name}.bias": random.gain(shape[0])}
    return tensors


def write_json(path: Path, value: Any) -> None:
    json_files.write_json(path, value, indent=2)


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of every shard."""
    shards = sorted(directory.glob("*.safetensors"))
    assert shards, f"no tensors in {directory}"
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors |= load_file(shard)
    return tensors


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", {"format": "pt"})


def write_shards(directory: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Deals the tensors to `shards` files in turn, with an index; one file has no index."""
    if shards == 1:
        write_tensors(directory, tensors)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def make_target(
    directory: Path | str,
    *,
    format: str = "bf16",
    nested: bool = True,
    layers: int = 7,
    hidden: int = 64,
    experts: int = 4,
    seed: int = 0,
    shards: int = 2,
    vision: bool = False,
    tokenizer: bool = True,
) -> Path:
    """Writes a random Kimi checkpoint and returns its directory.

    `format` is bf16, int4, fp8-block or nvfp4; `nested` means kimi_k25 with `language_model.`
    names, else kimi_k2. Seven layers are the fewest whose default capture layers (1, L//2-1, L-4)
    are three different ones.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text = text_config(layers=layers, hidden=hidden, experts=experts)
    config, prefix = target_config(text, nested=nested), "language_model." if nested else ""
    tensors = {f"{prefix}{name}": tensor for name, tensor in text_tensors(text, seed).items()}
    if nested and not vision:
        del config["vision_config"]
    tensors = quantized(directory, config, tensors, format)
    if vision:
        tensors |= vision_tensors(config, seed)
    write_json(
        directory / "generation_config.json",
        {"eos_token_id": text["eos_token_id"], "max_length": text["max_position_embeddings"]},
    )
    write_shards(directory, tensors, shards)
    if tokenizer:
        make_tokenizer(directory, vocab_size=text["vocab_size"])
    return directory


def quantized(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], format: str
) -> dict[str, torch.Tensor]:
    """The tensors in this format; writes the config.json that says so, and hf_quant_config.json."""
    text = config.get("text_config", config)
    if format == "int4":
        text["quantization_config"] = INT4_CONFIG
    elif format == "fp8-block":
        config["quantization_config"] = FP8_CONFIG
    elif format == "nvfp4":
        prefix = "" if text is config else "language_model."
        block = nvfp4_config(text["num_hidden_layers"], prefix)
        config["quantization_config"] = block
        write_json(directory / "hf_quant_config.json", hf_quant_config(block))
    write_json(directory / "config.json", config)
    return quantize_tensors(tensors, format)


def make_tokenizer(directory: Path | str, *, vocab_size: int = VOCAB) -> Path:
    """A tiktoken vocabulary of 256 bytes and Kimi's 256 special tokens, and a chat template."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    base = vocab_size - RESERVED
    if base != 256:
        raise ValueError("the tiny tokenizer has the 256 bytes as its base vocabulary")
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(base)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plain, added = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False), {}
    for offset in range(RESERVED):
        name = SPECIALS.get(offset, f"<|reserved_token_{base + offset}|>")
        added[str(base + offset)] = plain | {"content": name, "special": offset not in VISIBLE}
    config = {
        "added_tokens_decoder": added,
        "model_max_length": 2048,
        "tokenizer_class": "TikTokenTokenizer",
    }
    config |= {f"{name}_token": f"[{name.upper()}]" for name in ("bos", "eos", "pad", "unk")}
    write_json(directory / "tokenizer_config.json", config)
    shutil.copy(FILES / "chat_template.jinja", directory)
    return directory


def head_config(
    text: dict[str, Any], attention: str, draft_vocab: int | None, aux: list[int]
) -> dict[str, Any]:
    """config.json of a head as ModelOpt exports it (with the training rope, no injected YaRN)."""
    hidden, shared = text["hidden_size"], ("vocab_size", "max_position_embeddings", *TOKENS)
    config = published("head.json") | {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    config |= {"num_key_value_heads": 4 if attention == "mla" else 2} | {
        key: text[key] for key in shared
    }
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = aux
    if attention == "mha":
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "head_dim": hidden // 4,
            "draft_vocab_size": draft_vocab or text["vocab_size"],
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
        }
    ranks = (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_theta",
    )
    yarn = text["rope_scaling"]
    config |= {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
    }
    config |= {key: text[key] for key in ranks} | {
        "rope_scaling": yarn | {"rope_type": yarn["type"]}
    }
    return config | ({"draft_vocab_size": draft_vocab} if draft_vocab else {})


def head_tensors(
    config: dict[str, Any], attention: str, num_aux: int, draft_vocab: int | None, seed: int
) -> dict[str, torch.Tensor]:
    random, hidden = _Random(seed + 100), config["hidden_size"]
    tensors = {"fc.weight": random.matrix(hidden, num_aux * hidden)}
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"layers.0.{norm}.weight"] = random.gain(hidden)
    if attention == "mla":
        tensors |= _mla(random, "layers.0.self_attn.", config, 2 * hidden)
    else:
        queries, keys = (
            config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value")
        )
        for projection, width in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"layers.0.self_attn.{projection}_proj.weight"] = random.matrix(
                width, 2 * hidden
            )
        tensors["layers.0.self_attn.o_proj.weight"] = random.matrix(hidden, queries)
    tensors |= _mlp(random, "layers.0.mlp.", hidden, config["intermediate_size"])
    tensors["norm.weight"] = random.gain(hidden)
    tensors["lm_head.weight"] = random.matrix(draft_vocab or config["vocab_size"], hidden)
    if draft_vocab:
        chosen = (
            torch.randperm(config["vocab_size"], generator=random.generator)[:draft_vocab]
            .sort()
            .values
        )
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
    return tensors


def make_head(
    directory: Path | str,
    target_dir: Path | str,
    *,
    attention: str = "mha",
    eagle: str = "3",
    draft_vocab: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Path:
    """Writes a random Eagle3 head for the target and returns its directory.

    EAGLE-3.1 adds one `fc_norm.{i}.weight` per captured state and `norm_output` feedback.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    target = read_json(Path(target_dir) / "config.json")
    text = target.get("text_config", target)
    last = text["num_hidden_layers"]
    aux = sorted(aux_layers or {1, last // 2 - 1, last - 4})
    config = head_config(text, attention, draft_vocab, aux)
    tensors = head_tensors(config, attention, len(aux), draft_vocab, seed)
    if eagle == "3.1":
        config |= {"fc_norm": True, "norm_output": True}
        random = _Random(seed + 200)
        tensors |= {
            f"fc_norm.{i}.weight": random.gain(text["hidden_size"]) for i in range(len(aux))
        }
    write_json(directory / "config.json", config)
    write_tensors(directory, tensors)
    return directory
