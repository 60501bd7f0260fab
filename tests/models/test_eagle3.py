"""models/eagle3.py against the published computation from scratch and transformers' layers.

Gains scatter around one (tests/tiny.py), so a norm that is missing, doubled or in the wrong place
shows.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.json_files import read_json
from tests.tiny import make_head, read_tensors
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

KINDS = [(a, e) for a in ("mha", "mla") for e in ("3", "3.1")]
STEPS, LENGTH = 4, 20


@pytest.fixture(scope="module")
def target(target_dir) -> KimiModel:
    return load_target(target_dir, dtype=torch.float64)


def load(
    tmp_path, target_dir, target, attention, eagle, draft_vocab=None
) -> tuple[Eagle3Head, dict, dict]:
    path = make_head(
        tmp_path / "head", target_dir, attention=attention, eagle=eagle, draft_vocab=draft_vocab
    )
    head = load_head(path, target, dtype=torch.float64)
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in read_tensors(path).items()}
    return head, tensors, read_json(path / "config.json")


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def frequencies(dim: int, theta: float, scaling: dict | None) -> Tensor:
    """YaRN as its paper has it: a ramp over the dimensions between two numbers of rotations."""
    plain = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    if not scaling:
        return plain
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(0, math.floor(dimension(scaling["beta_fast"])))
    high = min(dim - 1, math.ceil(dimension(scaling["beta_slow"])))
    keep = [1 - min(1.0, max(0.0, (i - low) / max(high - low, 0.001))) for i in range(dim // 2)]
    kept = torch.tensor(keep, dtype=torch.float64)
    return plain * kept + plain / factor * (1 - kept)


def rotate(x: Tensor, positions: Tensor, freq: Tensor, interleaved: bool) -> Tensor:
    """Each pair as a complex number times exp(i * position * frequency). x [T, heads, dim]."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(freq), positions[:, None].double() * freq
    ).unsqueeze(1)
    real = torch.view_as_real(turned)
    return real.flatten(-2) if interleaved else torch.cat((real[..., 0], real[..., 1]), -1)


class Reference:
    """One sequence, no cache: attention over explicit lists of keys and values."""

    def __init__(self, tensors: dict[str, Tensor], config: dict, embed: Tensor) -> None:
        self.w, self.c, self.embed, self.eps = tensors, config, embed, config["rms_norm_eps"]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def fuse(self, aux: Tensor) -> Tensor:
        if self.c.get("fc_norm"):
            states = aux.split(self.c["hidden_size"], -1)
            aux = torch.cat(
                [norm(s, self.w[f"fc_norm.{i}.weight"], self.eps) for i, s in enumerate(states)], -1
            )
        return aux @ self.w["fc.weight"].T

    def qkv(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        w, c = {k.removeprefix("layers.0.self_attn."): v for k, v in self.w.items()}, self.c
        if "kv_lora_rank" not in c:
            q, k, v = (
                (u @ w[f"{x}_proj.weight"].T).unflatten(-1, (-1, c["head_dim"]))
                for x in ("q", "k", "v")
            )
            freq = frequencies(c["head_dim"], c["rope_theta"], c["rope_scaling"])
            group = c["num_attention_heads"] // c["num_key_value_heads"]
            k = rotate(k, positions, freq, False).repeat_interleave(group, 1)
            return (
                rotate(q, positions, freq, False),
                k,
                v.repeat_interleave(group, 1),
                c["head_dim"] ** -0.5,
            )
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        freq = frequencies(rope, c["rope_theta"], c["rope_scaling"])
        q = (
            norm(u @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], self.eps)
            @ w["q_b_proj.weight"].T
        )
        q = q.unflatten(-1, (heads, -1))
        latent = u @ w["kv_a_proj_with_mqa.weight"].T
        shared = rotate(latent[:, None, c["kv_lora_rank"] :], positions, freq, True).expand(
            -1, heads, -1
        )
        kv = (
            norm(latent[:, : c["kv_lora_rank"]], w["kv_a_layernorm.weight"], self.eps)
            @ w["kv_b_proj.weight"].T
        )
        kv = kv.unflatten(-1, (heads, -1))
        gain = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], positions, freq, True)), -1)
        return (
            q,
            torch.cat((kv[..., :nope], shared), -1),
            kv[..., nope:],
            gain**2 * (nope + rope) ** -0.5,
        )

    def step(self, x: Tensor, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Appends the rows to the keys; row t sees all keys up to its own."""
        layer = "layers.0."
        embedded = norm(self.embed[tokens], self.w[f"{layer}input_layernorm.weight"], self.eps)
        u = torch.cat((embedded, norm(x, self.w[f"{layer}hidden_norm.weight"], self.eps)), -1)
        positions = torch.arange(first, first + len(x))
        q, k, v, scale = self.qkv(u, positions)
        del self.keys[first:], self.values[first:]
        self.keys.extend(k)
        self.values.extend(v)
        rows = []
        for t in range(len(x)):
            keys, values = (
                torch.stack(self.keys[: first + t + 1]),
                torch.stack(self.values[: first + t + 1]),
            )
            weights = torch.softmax(torch.einsum("hd,shd->hs", q[t], keys) * scale, -1)
            rows.append(torch.einsum("hs,shd->hd", weights, values).flatten())
        y = x + torch.stack(rows) @ self.w[f"{layer}self_attn.o_proj.weight"].T
        h = norm(y, self.w[f"{layer}post_attention_layernorm.weight"], self.eps)
        gate, up = (
            h @ self.w[f"{layer}mlp.gate_proj.weight"].T,
            h @ self.w[f"{layer}mlp.up_proj.weight"].T,
        )
        y = y + (gate * torch.sigmoid(gate) * up) @ self.w[f"{layer}mlp.down_proj.weight"].T
        normed = norm(y, self.w["norm.weight"], self.eps)
        return (normed if self.c.get("norm_output") else y), normed


@pytest.mark.parametrize(("attention", "eagle"), KINDS)
def test_equals_the_published_computation(tmp_path, target_dir, target, attention, eagle):
    """Prefill and four draft steps equal float64 from scratch, also after a rollback."""
    head, tensors, config = load(tmp_path, target_dir, target, attention, eagle)
    torch.manual_seed(1)
    aux = torch.randn(
        1, LENGTH, head.spec.num_aux * head.spec.target_hidden_size, dtype=torch.float64
    )
    tokens = torch.randint(0, head.spec.vocab_size, (1, LENGTH))
    reference = Reference(tensors, config, target.embed.weight)
    cache = head.new_cache(1, 64)
    worst = 0.0
    for first in (0, 12):  # the second round rolls back to position 12 and goes on differently
        rows = aux[:, first:] * (1 + first)
        x, want = head.fuse(rows), reference.fuse(rows[0])
        draft = tokens[:, first:]
        start = torch.tensor([first])
        for _ in range(STEPS):
            feedback, normed = head(x, draft, start, cache)
            want_feedback, want_normed = reference.step(want, draft[0], int(start))
            worst = max(worst, float((feedback[0] - want_feedback).abs().max()))
            want_logits = want_normed @ tensors["lm_head.weight"].T
            worst = max(
                worst, float((head.logits(normed)[0] - want_logits).abs().max()) / 10
            )  # logits are float32
            start = start + draft.shape[1]
            x, want = feedback[:, -1:], want_feedback[-1:]
            draft = head.logits(normed)[:, -1:].argmax(-1)
    print(f"{attention} EAGLE-{eagle}: max difference {worst:.2e}")
    assert worst < 1e-6


@pytest.mark.parametrize(("attention", "eagle"), KINDS)
def test_cached_steps_equal_one_causal_forward(tmp_path, target_dir, target, attention, eagle):
    """Rows of different lengths in one cache, fed in chunks, equal plain causal forwards."""
    head, _, _ = load(tmp_path, target_dir, target, attention, eagle)
    torch.manual_seed(2)
    x = torch.randn(3, LENGTH, head.spec.hidden_size, dtype=torch.float64)
    tokens = torch.randint(0, head.spec.vocab_size, (3, LENGTH))
    whole = head(x, tokens, None, None)[1]
    cache = head.new_cache(5, 32)
    lengths = torch.tensor([3, 7, 11])
    for row, length in enumerate(lengths.tolist()):
        head(
            x[row : row + 1, :length],
            tokens[row : row + 1, :length],
            torch.tensor([0]),
            cache,
            row=row + 1,
        )
    for _ in range(9):
        pick = lengths[:, None]
        piece = torch.take_along_dim(x, pick[..., None].expand(-1, -1, x.shape[-1]), 1)
        got = head(piece, torch.take_along_dim(tokens, pick, 1), lengths, cache, row=1)[1]
        want = torch.take_along_dim(whole, pick[..., None].expand(-1, -1, x.shape[-1]), 1)
        assert (got - want).abs().max() < 1e-6  # the latent attention takes its softmax in float32
        lengths = lengths + 1


@pytest.mark.parametrize("attention", ["mla", "mha"])
def test_attention_equals_transformers(tmp_path, target_dir, target, attention):
    """A head's layer equals transformers' DeepSeek-V3 or Llama attention on its 2H-wide weights."""
    from transformers import DeepseekV3Config, LlamaConfig
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.llama import modeling_llama as llama

    from trtspec.models.attention import batch_step

    head, tensors, config = load(tmp_path, target_dir, target, attention, "3")
    kept = {
        key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    }
    theta = {"rope_theta": config["rope_theta"]}
    if attention == "mla":
        ranks = (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        kept |= {key: config[key] for key in ranks} | {"max_position_embeddings": 2048}
        kept["rope_parameters"] = config["rope_scaling"] | theta | {"rope_type": "yarn"}
        settings = DeepseekV3Config(hidden_size=2 * config["hidden_size"], **kept)
        kinds = deepseek.DeepseekV3Attention, deepseek.DeepseekV3RotaryEmbedding
    else:
        kept |= {
            "head_dim": config["head_dim"],
            "rope_parameters": theta | {"rope_type": "default"},
        }
        settings = LlamaConfig(hidden_size=2 * config["hidden_size"], **kept)
        kinds = llama.LlamaAttention, llama.LlamaRotaryEmbedding
    settings._attn_implementation = "eager"
    oracle, rope, prefix = kinds[0](settings, 0).double(), kinds[1](settings), "layers.0.self_attn."
    oracle.o_proj = torch.nn.Linear(
        *reversed(tensors[f"{prefix}o_proj.weight"].shape), bias=False
    ).double()
    oracle.load_state_dict(
        {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    )
    for module in oracle.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config["rms_norm_eps"]
    torch.manual_seed(3)
    u = torch.randn(2, LENGTH, 2 * head.spec.hidden_size, dtype=torch.float64)
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        want = oracle(
            hidden_states=u,
            position_embeddings=rope(u, torch.arange(LENGTH)[None]),
            attention_mask=mask,
        )[0]
        step = batch_step(torch.zeros(2, LENGTH), head.rope, torch.float64)
        got = head.self_attn(u, step)
    assert (got - want).abs().max() < 1e-6  # both rotate by float32 angles


def test_draft_vocabulary_maps_to_target_ids(tmp_path, target_dir, target):
    head, tensors, _ = load(tmp_path, target_dir, target, "mla", "3", draft_vocab=100)
    ids = head.to_target_ids(torch.arange(100))
    assert ids.tolist() == (torch.arange(100) + tensors["d2t"]).tolist()
    assert head.target_ids is not None
    assert head.logits(torch.zeros(1, 64, dtype=torch.float64)).shape == (1, 100)
    whole, _, _ = load(tmp_path, target_dir, target, "mla", "3")
    assert whole.target_ids is None
    assert whole.to_target_ids(torch.tensor([7])).tolist() == [7]
