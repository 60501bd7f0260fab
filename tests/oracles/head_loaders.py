"""SGLang's loader of Eagle3 heads, written anew, and the layers of such heads in plain PyTorch.

SGLang does not run on a CPU. What stands here are its rules (which tensor goes to which parameter,
which key of config.json is read, with which default, and what fails), from llama_eagle3.py and
kimi_k25_eagle3.py of 2026. Nothing is taken from trtspec, and nothing here was compared with a
running engine. The config is read as transformers 4 hands it over: the keys of the file.
engine_loaders.py puts the layers in place of TensorRT-LLM's.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Config = dict[str, Any]
Make = Callable[..., Any]  # of a linear
Tensors = dict[str, Tensor]


def linear(inputs: int, outputs: int, split: str | None = None) -> nn.Linear:
    """`split`: how it is dealt to ranks, where there are several."""
    return nn.Linear(inputs, outputs, bias=False)


def rope(dim: int, theta: float, scaling: Config | None) -> LlamaRotaryEmbedding:
    """Plain rope or YaRN, as transformers computes them."""
    settings = scaling or {}
    name = settings.get("rope_type", settings.get("type", "default"))
    config = LlamaConfig(hidden_size=dim, num_attention_heads=1, max_position_embeddings=1)
    config.rope_parameters = settings | {"rope_theta": theta, "rope_type": name}
    return LlamaRotaryEmbedding(config)


def rotate(q: Tensor, k: Tensor, rope: LlamaRotaryEmbedding) -> tuple[Tensor, Tensor]:
    """q and k [T, heads, dim], whose pairs are (i, i + dim/2)."""
    cos, sin = rope(q, torch.arange(len(q))[None])
    return apply_rotary_pos_emb(q, k, cos[0], sin[0])


def paired(x: Tensor) -> Tensor:
    """Puts pairs (2i, 2i + 1) at (i, i + dim/2)."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [T, heads, dim]; k and v may have fewer heads.

    Returns [T, heads * dim of v].
    """
    heads_first = [part.transpose(0, 1)[None] for part in (q, k, v)]
    attended = F.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


class GroupedAttention(nn.Module):
    """q, k and v in one matrix over 2H; rope pairs are (i, i + d/2)."""

    def __init__(
        self, config: Config, theta: float, scaling: Config | None, make: Make = linear
    ) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.size = config.get("head_dim") or hidden // self.heads
        self.qkv_proj = make(2 * hidden, (self.heads + 2 * self.kv_heads) * self.size, "column")
        self.o_proj = make(self.heads * self.size, hidden, "row")
        self.rope = rope(self.size, theta, scaling)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        rows = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (
            part.unflatten(-1, (-1, self.size))
            for part in self.qkv_proj(hidden_states).split(rows, -1)
        )
        return self.o_proj(attend(*rotate(q, k, self.rope), v, self.size**-0.5))


class MultiLatentAttention(nn.Module):
    """q_a and kv_a in one matrix over 2H, named by `fused`; rope pairs are (2i, 2i + 1)."""

    def __init__(
        self, config: Config, theta: float, scaling: Config, fused: str, make: Make = linear
    ) -> None:
        super().__init__()
        hidden, self.heads, eps = (
            config["hidden_size"],
            config["num_attention_heads"],
            config["rms_norm_eps"],
        )
        self.nope, self.rope_size, self.value = (
            config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        self.ranks = [config["q_lora_rank"], config["kv_lora_rank"], self.rope_size]
        self.fused = fused
        setattr(self, fused, make(2 * hidden, sum(self.ranks)))
        self.q_a_layernorm, self.kv_a_layernorm = (
            nn.RMSNorm(self.ranks[0], eps),
            nn.RMSNorm(self.ranks[1], eps),
        )
        self.q_b_proj = make(self.ranks[0], self.heads * (self.nope + self.rope_size), "column")
        self.kv_b_proj = make(self.ranks[1], self.heads * (self.nope + self.value), "column")
        self.o_proj = make(self.heads * self.value, hidden, "row")
        self.rope = rope(self.rope_size, theta, scaling)
        gain = yarn_get_mscale(scaling["factor"], scaling.get("mscale_all_dim", 0.0))
        self.scale = gain**2 * (self.nope + self.rope_size) ** -0.5

    def keys_and_values(self, latent: Tensor) -> tuple[Tensor, ...]:
        kv = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        return kv.split([self.nope, self.value], -1)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        q_a, latent, k_rope = getattr(self, self.fused)(hidden_states).split(self.ranks, -1)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.heads, -1))
        k_nope, v = self.keys_and_values(self.kv_a_layernorm(latent))
        q_nope, q_rope = q.split([self.nope, self.rope_size], -1)
        q_rope, k_rope = rotate(paired(q_rope), paired(k_rope[:, None]), self.rope)
        k_rope = k_rope.expand(-1, self.heads, -1)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
        return self.o_proj(attend(q, k, v, self.scale))


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int, make: Make = linear) -> None:
        super().__init__()
        self.gate_up_proj = make(hidden, 2 * inner, "column")
        self.down_proj = make(inner, hidden, "row")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Config, attention: nn.Module) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = attention, GatedMlp(hidden, config["intermediate_size"])
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def forward(self, embeds: Tensor, x: Tensor) -> Tensor:
        x = x + self.self_attn(torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """A head as the engine holds it, with the target's id of each draft id.

    `captured` states come in.
    """

    def __init__(
        self, config: Config, layer: nn.Module, captured: int, norms: tuple[bool, bool, bool]
    ) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        inputs = config.get("target_hidden_size", hidden)
        vocabulary = config.get("draft_vocab_size") or config["vocab_size"]
        before, each, self.norm_output = norms
        self.fc = linear(captured * inputs, hidden)
        self.input_norm = nn.RMSNorm(captured * inputs, eps) if before else None
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(inputs, eps) for _ in range(captured)) if each else None
        )
        self.midlayer, self.norm = layer, nn.RMSNorm(hidden, eps)
        self.lm_head = linear(hidden, vocabulary)
        self.ids = torch.arange(vocabulary)
        self.embedding = torch.empty(0)

    def fuse(self, states: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1
            )
        elif self.input_norm is not None:
            states = self.input_norm(states)
        return self.fc(states)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what the next step gets), [T, Vd] and [T, H]."""
        y = self.midlayer(self.embedding[tokens], x)
        normed = self.norm(y)
        return self.lm_head(normed), normed if self.norm_output else y


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _sglang_rope(config: Config) -> tuple[float, Config | None]:
    parameters = config.get("rope_parameters")
    if parameters is None:
        return config["rope_theta"], config.get("rope_scaling")
    plain = parameters.get("rope_type") == "default"
    return parameters.get("rope_theta", 10000), None if plain else parameters


def load_sglang(config: Config, tensors: Tensors, target: Tensors, captured: int) -> Draft:
    """The class by the architecture's name.

    Unknown names are dropped; nothing says which parameter was not filled. `captured` is what the
    engine hands over: as many states as the config lists layers, else three.
    """
    mla = config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    states = len(ids) if ids else 3
    states = states if mla else config.get("num_aux_hidden_states") or states
    theta, scaling = _sglang_rope(config)
    eagle = config.get("eagle_config") or {}
    norms = (
        not mla and bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
        bool(config.get("fc_norm") or config.get("use_aux_norm")),
        bool(config.get("norm_output")),
    )
    if mla:
        attention: nn.Module = MultiLatentAttention(
            config, theta, scaling or {}, "fused_qkv_a_proj_with_mqa"
        )
    else:
        attention = GroupedAttention(config, theta, scaling)
    loaded = Draft(config, Layer(config, attention), states, norms)
    for parameter in loaded.parameters():
        parameter.data.fill_(torch.nan)  # what no rule fills shows
    named = {}
    for name, value in tensors.items():
        named[re.sub(r"^(model\.)?(layers\.0|midlayer)\.", "midlayer.", name)] = value
    loaded.ids += named.get("d2t", torch.zeros_like(loaded.ids))
    more = {**FUSED, "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
    for name, parameter in loaded.named_parameters():
        parent, last = name.removesuffix(".weight").rpartition(".")[::2]
        parts = [named.get(f"{parent}.{part}.weight") for part in more.get(last, ())] or [
            named.get(name)
        ]
        if all(part is not None for part in parts):
            parameter.data.copy_(torch.cat(parts))  # type: ignore[arg-type]
    if config.get("draft_vocab_size") is None:
        loaded.lm_head.weight.data.copy_(target["lm_head.weight"])
    different = (config.get("target_hidden_size") or config["hidden_size"]) != config["hidden_size"]
    loaded.embedding = (named if different else target)["embed_tokens.weight"]
    return loaded
