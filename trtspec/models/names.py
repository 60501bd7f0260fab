"""Names in a Kimi checkpoint <-> parameters of `KimiModel`: one table, both directions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from trtspec.models.kimi import KimiModel
from trtspec.specs import ModelSpec


@dataclass(frozen=True)
class Source:
    """One parameter and the checkpoint tensors whose rows, concatenated in order, are its value."""

    parameter: str
    names: tuple[str, ...]


def layout(spec: ModelSpec) -> Iterator[Source]:
    """Every parameter of `KimiModel(spec)` with its names in a published checkpoint."""
    prefix = spec.name_prefix
    yield Source("embed.weight", (f"{prefix}model.embed_tokens.weight",))
    yield Source("norm.weight", (f"{prefix}model.norm.weight",))
    yield Source("lm_head.weight", (f"{prefix}lm_head.weight",))
    for index in range(spec.num_hidden_layers):
        yield from _layer_layout(spec, f"layers.{index}.", f"{prefix}model.layers.{index}.")


def layer_layout(spec: ModelSpec, index: int) -> Iterator[Source]:
    """Every parameter of decoder layer `index`, named as in its `DecoderLayer` (without `layers.N.`)."""
    yield from _layer_layout(spec, "", f"{spec.name_prefix}model.layers.{index}.")


def _layer_layout(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Source]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Source(f"{ours}{name}.weight", (f"{theirs}{name}.weight",))
    ours_attn, attn = f"{ours}self_attn.", f"{theirs}self_attn."
    yield Source(f"{ours_attn}qkv_a_proj.weight", (f"{attn}q_a_proj.weight", f"{attn}kv_a_proj_with_mqa.weight"))
    for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        yield Source(f"{ours_attn}{name}.weight", (f"{attn}{name}.weight",))
    index = int(theirs.rstrip(".").rsplit(".", 1)[1])
    if index < spec.first_k_dense_replace:
        yield from _mlp_layout(f"{ours}mlp.", f"{theirs}mlp.")
        return
    yield Source(f"{ours}mlp.gate.weight", (f"{theirs}mlp.gate.weight",))
    yield Source(f"{ours}mlp.gate.e_score_correction_bias", (f"{theirs}mlp.gate.e_score_correction_bias",))
    yield from _mlp_layout(f"{ours}mlp.shared_experts.", f"{theirs}mlp.shared_experts.")
    experts = [f"{theirs}mlp.experts.{expert}." for expert in range(spec.n_routed_experts)]
    pairs = tuple(f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up"))
    yield Source(f"{ours}mlp.experts.gate_up", pairs)
    yield Source(f"{ours}mlp.experts.down", tuple(f"{expert}down_proj.weight" for expert in experts))


def _mlp_layout(ours: str, theirs: str) -> Iterator[Source]:
    yield Source(f"{ours}gate_up_proj.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"))
    yield Source(f"{ours}down_proj.weight", (f"{theirs}down_proj.weight",))


def checkpoint_tensors(model: KimiModel) -> dict[str, Tensor]:
    """The model's parameters under their published names and shapes: the inverse of loading a BF16 checkpoint."""
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for source in layout(model.spec):
        value = state[source.parameter]
        if value.dim() == 3:
            value = value.flatten(0, 1)
        rows = rows_of(model.spec, source, len(value))
        tensors.update(zip(source.names, (part.contiguous() for part in value.split(rows)), strict=True))
    return tensors


def rows_of(spec: ModelSpec, source: Source, total: int) -> list[int]:
    """How many rows of the parameter each checkpoint tensor supplies."""
    if source.parameter.endswith("qkv_a_proj.weight"):
        return [spec.q_lora_rank, total - spec.q_lora_rank]
    return [total // len(source.names)] * len(source.names)
