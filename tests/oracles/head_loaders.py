"""TensorRT-LLM's and SGLang's loaders of Eagle3 heads, written anew from what their files do, in plain PyTorch.

Neither engine runs on a CPU. What stands here are their rules (which tensor goes to which parameter, which key of
config.json is read, with which default, and what fails), from TensorRT-LLM's modeling_speculative.py at 00679c66 and
modeling_deepseekv3.py at a43cf9e3, and SGLang's llama_eagle3.py and kimi_k25_eagle3.py of 2026. Nothing is taken from
trtspec, and nothing here was compared with a running engine. The config is read as transformers 4 hands it over: the
keys of the file.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]
Tensors = dict[str, Tensor]


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((width,), torch.nan)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight.data.fill_(torch.nan)  # what no loader fills shows
    return layer


def frequencies(dim: int, theta: float, scaling: Config | None) -> tuple[Tensor, float]:
    """(inverse frequencies [dim/2], factor of cos and sin) of plain rope or YaRN (arXiv 2309.00071)."""
    base = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = (scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default"
    if scaling is None or kind == "default":
        return base.float(), 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def turns(beta: float) -> float:
        return dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(turns(scaling.get("beta_slow", 1))), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    gain = yarn_gain(factor, scaling.get("mscale", 1.0)) / yarn_gain(
        factor, scaling.get("mscale_all_dim", 0.0)
    )
    return (base / factor * ramp + base * (1 - ramp)).float(), gain


def yarn_gain(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, angles: Tensor, gain: float, interleaved: bool) -> Tensor:
    """x [T, heads, dim], angles [T, dim/2]."""
    cos, sin = angles.cos()[:, None] * gain, angles.sin()[:, None] * gain
    one, two = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = (one * cos - two * sin, two * cos + one * sin)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [T, heads, dim]; k and v may have fewer heads. Returns [T, heads * dim of v]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


class GroupedAttention(nn.Module):
    """q, k and v in one matrix over 2H; rope pairs are (i, i + d/2)."""

    def __init__(self, config: Config, theta: float, scaling: Config | None) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads", self.heads)
        self.size = config.get("head_dim") or hidden // self.heads
        self.qkv_proj = linear(2 * hidden, (self.heads + 2 * self.kv_heads) * self.size)
        self.o_proj = linear(self.heads * self.size, hidden)
        self.rope = frequencies(self.size, theta, scaling)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in self.qkv_proj(x).split(rows, -1))
        angles = torch.arange(len(x))[:, None] * self.rope[0]
        q, k = (rotate(part, angles, self.rope[1], False) for part in (q, k))
        return self.o_proj(attend(q, k, v, self.size**-0.5))


class MultiLatentAttention(nn.Module):
    """q_a and kv_a in one matrix over 2H, under the name that `fused` gives it; rope pairs are (2i, 2i + 1)."""

    def __init__(self, config: Config, theta: float, scaling: Config, fused: str) -> None:
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
        setattr(self, fused, linear(2 * hidden, sum(self.ranks)))
        self.q_a_layernorm, self.kv_a_layernorm = Norm(self.ranks[0], eps), Norm(self.ranks[1], eps)
        self.q_b_proj = linear(self.ranks[0], self.heads * (self.nope + self.rope_size))
        self.kv_b_proj = linear(self.ranks[1], self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden)
        self.rope = frequencies(self.rope_size, theta, scaling)
        gain = yarn_gain(scaling["factor"], scaling.get("mscale_all_dim", 0.0))
        self.scale = gain**2 * (self.nope + self.rope_size) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q_a, latent, k_rope = getattr(self, self.fused)(x).split(self.ranks, -1)
        q = self.q_b_proj(self.q_a_layernorm(q_a)).unflatten(-1, (self.heads, -1))
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([self.nope, self.value], -1)
        angles = torch.arange(len(x))[:, None] * self.rope[0]
        q_rope = rotate(q[..., self.nope :], angles, self.rope[1], True)
        k_rope = rotate(k_rope[:, None], angles, self.rope[1], True).expand(-1, self.heads, -1)
        q, k = torch.cat((q[..., : self.nope], q_rope), -1), torch.cat((k_nope, k_rope), -1)
        return self.o_proj(attend(q, k, v, self.scale))


class GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(hidden, 2 * inner), linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: Config, attention: nn.Module) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn, self.mlp = attention, GatedMlp(hidden, config["intermediate_size"])
        self.input_layernorm, self.hidden_norm = Norm(hidden, eps), Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)

    def forward(self, embeds: Tensor, x: Tensor) -> Tensor:
        x = x + self.self_attn(torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), -1))
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """The module that both engines call `model`. `captured` is how many states they hand it."""

    d2t: nn.Parameter | None

    def __init__(
        self, config: Config, layer: nn.Module, captured: int, norms: tuple[bool, bool, bool]
    ) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        inputs = config.get("target_hidden_size", hidden)
        before, each, self.norm_output = norms
        self.fc = linear(captured * inputs, hidden)
        self.input_norm = Norm(captured * inputs, eps) if before else None
        self.fc_norm = nn.ModuleList(Norm(inputs, eps) for _ in range(captured)) if each else None
        self.midlayer, self.norm = layer, Norm(hidden, eps)
        self.embedding: Tensor | None = None

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
        """(what lm_head sees, what the next step gets), [T, H] each."""
        assert self.embedding is not None
        y = self.midlayer(self.embedding[tokens], x)
        normed = self.norm(y)
        return normed, normed if self.norm_output else y


class Loaded(nn.Module):
    """A head as an engine holds it: `model`, `lm_head`, and the target's id of each draft id, or None."""

    def __init__(self, model: Draft, lm_head: nn.Linear) -> None:
        super().__init__()
        self.model, self.lm_head = model, lm_head
        self.ids: Tensor | None = None

    def two_steps(self, states: Tensor, tokens: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
        normed, feedback = self.model(self.model.fuse(states), tokens)
        return self.lm_head(normed), self.lm_head(self.model(feedback, again)[0])


def target_ids(loaded: Loaded, vocabulary: int) -> Tensor:
    return torch.arange(vocabulary) if loaded.ids is None else loaded.ids


def _trtllm_model(config: Config, captured: int) -> Loaded:
    """Eagle3ForCausalLM: MLA by a truthy kv_lora_rank, rope from the top level, YaRN for every MLA draft."""
    draft_vocabulary = config.get("draft_vocab_size") or config["vocab_size"]
    eagle = config.get("eagle_config") or {}
    assert "torch_dtype" in config, "config.torch_dtype"
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling")
    if config.get("kv_lora_rank"):
        attention: nn.Module = MultiLatentAttention(config, theta, scaling, "kv_a_proj_with_mqa")
    else:
        assert "attention_bias" in config, "config.attention_bias"
        attention = GroupedAttention(config, theta, scaling)
    norms = (
        bool(eagle.get("norm_before_fc")),
        bool(config.get("fc_norm")),
        bool(eagle.get("return_hidden_post_norm") or config.get("norm_output")),
    )
    model = Draft(config, Layer(config, attention), captured, norms)
    if draft_vocabulary != config["vocab_size"]:
        model.d2t = nn.Parameter(
            torch.empty(draft_vocabulary, dtype=torch.int32), requires_grad=False
        )
    return Loaded(model, linear(config["hidden_size"], draft_vocabulary))


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_trtllm(config: Config, tensors: Tensors, target: Tensors, captured: int) -> Loaded:
    """`captured` follows from eagle3_layers_to_capture of the YAML (three by default). Raises KeyError or RuntimeError
    where the engine's loader does."""
    loaded = _trtllm_model(config, captured)
    named = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in tensors.items()}
    named = {name if "lm_head" in name else f"model.{name}": value for name, value in named.items()}
    own = "lm_head.weight" in named
    mla = bool(config.get("kv_lora_rank"))
    for name, module in loaded.named_modules():
        if not module._parameters or (name == "lm_head" and not own):
            continue
        parent, _, last = name.rpartition(".")
        if mla and last == "kv_a_proj_with_mqa":
            parts = [
                named[f"{parent}.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")
            ]
            module.weight.data.copy_(torch.cat(parts))
        elif last in FUSED:
            parts = [named[f"{parent}.{part}.weight"] for part in FUSED[last]]
            module.weight.data.copy_(torch.cat(parts))
        else:
            inside = {
                key.removeprefix(f"{name}."): value
                for key, value in named.items()
                if key.startswith(f"{name}.")
            }
            # the loader of MLA weights goes through all parameters below, the generic one through the module's own
            for key, parameter in module.named_parameters(recurse=mla):
                parameter.data.copy_(inside[key])
    if not own:
        if loaded.lm_head.weight.shape != target["lm_head.weight"].shape:
            raise RuntimeError("the target's lm_head has another shape")
        loaded.lm_head.weight.data.copy_(target["lm_head.weight"])
    different = config.get("target_hidden_size", config["hidden_size"]) != config["hidden_size"]
    loaded.model.embedding = (
        named["model.embed_tokens.weight"] if different else target["embed_tokens.weight"]
    )
    if (d2t := getattr(loaded.model, "d2t", None)) is not None:
        loaded.ids = d2t.long() + torch.arange(len(d2t))
    return loaded


def _sglang_rope(config: Config) -> tuple[float, Config | None]:
    parameters = config.get("rope_parameters")
    if parameters is None:
        return config["rope_theta"], config.get("rope_scaling")
    plain = parameters.get("rope_type") == "default"
    return parameters.get("rope_theta", 10000), None if plain else parameters


def load_sglang(config: Config, tensors: Tensors, target: Tensors, captured: int) -> Loaded:
    """The class by the architecture's name. Unknown names are dropped; nothing says which parameter was not filled.
    `captured` is what the engine hands over: as many states as the config lists layers, else three."""
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
    stated = config.get("draft_vocab_size")
    loaded = Loaded(
        Draft(config, Layer(config, attention), states, norms),
        linear(config["hidden_size"], stated or config["vocab_size"]),
    )
    named = {}
    for name, value in tensors.items():
        if name == "d2t":
            loaded.ids = value + torch.arange(len(value))
        elif name != "t2d":
            plain = re.sub(r"^(model\.)?(layers\.0|midlayer)\.", "midlayer.", name)
            named[plain if plain.startswith("lm_head") else f"model.{plain}"] = value
    more = {**FUSED, "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
    for name, parameter in loaded.named_parameters():
        parent, last = name.removesuffix(".weight").rpartition(".")[::2]
        parts = [named.get(f"{parent}.{part}.weight") for part in more.get(last, ())] or [
            named.get(name)
        ]
        if all(part is not None for part in parts):
            parameter.data.copy_(torch.cat(parts))  # type: ignore[arg-type]
    if stated is None:
        loaded.lm_head.weight.data.copy_(target["lm_head.weight"])
    different = (config.get("target_hidden_size") or config["hidden_size"]) != config["hidden_size"]
    loaded.model.embedding = (
        named["model.embed_tokens.weight"] if different else target["embed_tokens.weight"]
    )
    return loaded


LOADERS: dict[str, Callable[[Config, Tensors, Tensors, int], Loaded]] = {
    "trtllm": load_trtllm,
    "sglang": load_sglang,
}
