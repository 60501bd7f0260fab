"""What the tensors of an Eagle3 head say about it: every dimension that a shape shows, where config.json states
another, and which tensors do not fit the others.

A dimension stands in several tensors and in config.json. What most of them say holds, so that one damaged tensor, or
one wrong key, is named alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from trtspec.checkpoint.headers import TensorInfo
from trtspec.errors import Problem
from trtspec.specs import HeadSpec

REMEDY = "fetch the checkpoint again, or ask its author which of the two is right"
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
ATTENTION = {
    "mha": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mla": ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"),
}
MAPS = ("d2t", "t2d")
OPTIONAL = ("lm_head.weight", "embed_tokens.weight", *MAPS, "input_norm.weight")
FLAGS = ("fc_norm", "norm_before_fc")
Shapes = dict[str, tuple[int, ...]]


def canonical_names(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Drops a leading `model.` and names the first decoder layer `layer.`, whatever the dialect calls it."""
    renamed = {}
    for name, info in tensors.items():
        plain = name.removeprefix("model.")
        for prefix in ("midlayer.", "layers.0."):
            if plain.startswith(prefix):
                plain = "layer." + plain.removeprefix(prefix)
        renamed[plain] = info
    return renamed


def layer_prefix(tensors: dict[str, TensorInfo]) -> str:
    return "midlayer." if any("midlayer." in name for name in tensors) else "layers.0."


def required_names(attention: str) -> list[str]:
    """Tensors without which no engine computes the head; lm_head, embed_tokens and d2t may be absent."""
    names = ["fc", "norm", *(f"layer.{norm}" for norm in NORMS), *(f"layer.mlp.{part}" for part in MLP)]
    return [f"{name}.weight" for name in names + [f"layer.self_attn.{part}" for part in ATTENTION[attention]]]


def expected_shapes(spec: HeadSpec) -> Shapes:
    """Canonical name -> shape of every tensor that a head of this record may hold. Linears are [outputs, inputs]; the
    first projections see embedding and state, 2H wide."""
    hidden, inner, captured = spec.hidden_size, spec.intermediate_size, spec.num_aux * spec.target_hidden_size
    shapes: Shapes = {f"layer.{norm}.weight": (hidden,) for norm in NORMS}
    shapes |= {"fc.weight": (hidden, captured), "norm.weight": (hidden,), "input_norm.weight": (captured,)}
    shapes |= {f"layer.mlp.{part}.weight": (inner, hidden) for part in ("gate_proj", "up_proj")}
    shapes["layer.mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {f"layer.self_attn.{part}.weight": shape for part, shape in _attention_shapes(spec).items()}
    shapes |= {f"fc_norm.{index}.weight": (spec.target_hidden_size,) for index in range(spec.num_aux)}
    shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)
    return shapes | {
        "embed_tokens.weight": (spec.vocab_size, hidden), "d2t": (spec.draft_vocab_size,), "t2d": (spec.vocab_size,)
    }  # fmt: skip


def _attention_shapes(spec: HeadSpec) -> Shapes:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    if spec.attention == "mha":
        queries, keys = heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        return {
            "q_proj": (queries, 2 * hidden), "k_proj": (keys, 2 * hidden), "v_proj": (keys, 2 * hidden),
            "o_proj": (hidden, queries),
        }  # fmt: skip
    return {
        "q_a_proj": (spec.q_lora_rank, 2 * hidden),
        "q_a_layernorm": (spec.q_lora_rank,),
        "q_b_proj": (heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim), spec.q_lora_rank),
        "kv_a_proj_with_mqa": (spec.kv_lora_rank + spec.qk_rope_head_dim, 2 * hidden),
        "kv_a_layernorm": (spec.kv_lora_rank,),
        "kv_b_proj": (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        "o_proj": (hidden, heads * spec.v_head_dim),
    }


def measure(
    tensors: dict[str, TensorInfo], declared: HeadSpec, config: dict[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """HeadSpec fields that the shapes decide, and a problem for each tensor or key that contradicts the rest. Without
    all the tensors that every head needs, or with one of another rank, only what is wrong with them."""
    latent = ("layer.self_attn.kv_", "layer.self_attn.q_a_", "layer.self_attn.q_b_")
    mla = any(name.startswith(latent) for name in tensors)
    attention = "mla" if mla else "mha"
    missing = [name for name in required_names(attention) if name not in tensors]
    if missing:
        message = (
            f"{len(missing)} tensors that an Eagle3 {attention.upper()} head needs are absent: {', '.join(missing)}"
        )
        return {"attention": attention}, [Problem("TS-HEAD-TENSOR-MISSING", "error", missing[0], message, REMEDY)]
    if wrong := [problem for name, info in tensors.items() if (problem := _wrong_rank(name, info)) is not None]:
        return {"attention": attention}, wrong
    shape = {name: info.shape for name, info in tensors.items() if name not in MAPS or len(info.shape) == 1}
    found: dict[str, Any] = {"attention": attention} | _widths(shape, declared, config)
    found |= _mla(shape, declared) if mla else _mha(shape, declared)
    found |= _vocabulary(shape, declared, config)
    found["has_d2t"] = "d2t" in tensors
    found["fc_norm"] = any(name.startswith("fc_norm.") for name in shape)
    found["norm_before_fc"] = "input_norm.weight" in shape
    return found, _disagreements(found, declared, config)


def _wrong_rank(name: str, info: TensorInfo) -> Problem | None:
    """Linears have two dimensions, norms one, and none is empty; `values` judges the maps."""
    rank = 1 if "norm" in name else 2
    known = name.endswith(".weight") and not name.startswith("layers.")
    if not known or (len(info.shape) == rank and info.numel):
        return None
    message = f"{name} is stored as {list(info.shape)}, where a head has {rank} dimension{'s' * (rank > 1)}, none empty"
    return Problem("TS-HEAD-TENSOR-SHAPE", "error", name, message, REMEDY)


def _most(stated: int, votes: list[int]) -> int:
    """What most of the tensors and config.json (`stated`, 0 where it says nothing) say; on a tie, config.json."""
    counted = Counter(([stated] if stated else []) + votes)
    return counted.most_common(1)[0][0]  # of equal counts the first


def _widths(shape: Shapes, declared: HeadSpec, config: dict[str, Any]) -> dict[str, Any]:
    gate, up, down, fc = (shape[f"{name}.weight"] for name in (*(f"layer.mlp.{part}" for part in MLP), "fc"))
    votes = [shape[f"layer.{norm}.weight"][0] for norm in NORMS] + [shape["norm.weight"][0], fc[0], down[0]]
    hidden = _most(declared.hidden_size, votes)
    norms = [size[0] for name, size in shape.items() if name.startswith("fc_norm.")]
    target = _most(declared.target_hidden_size if config.get("target_hidden_size") else hidden, norms)
    states = [fc[1] // target, *([len(norms)] if norms else [])]
    states += [shape["input_norm.weight"][0] // target] if "input_norm.weight" in shape else []
    return {
        "hidden_size": hidden,
        "target_hidden_size": target,
        "intermediate_size": _most(declared.intermediate_size, [gate[0], up[0], down[1]]),
        "num_aux": _most(declared.num_aux, states),
    }


def _mha(shape: Shapes, declared: HeadSpec) -> dict[str, Any]:
    """Rows of q and k are heads times their size: config.json decides both, unless another size fits them."""
    q, k, v, o = (shape[f"layer.self_attn.{part}.weight"] for part in ATTENTION["mha"])
    heads, kv_heads, size = declared.num_attention_heads, declared.num_key_value_heads, declared.head_dim
    queries, keys = _most(heads * size, [q[0], o[1]]), _most(kv_heads * size, [k[0], v[0]])
    if (queries, keys) != (heads * size, kv_heads * size):
        same = queries % heads == 0 and keys % kv_heads == 0 and queries // heads == keys // kv_heads
        size = queries // heads if same else size
        heads, kv_heads = max(queries // size, 1), max(keys // size, 1)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}


def _mla(shape: Shapes, declared: HeadSpec) -> dict[str, Any]:
    """Ranks from norms and projections. Rows of the b-projections are a number of heads times two sizes, of which only
    config.json says which is which: it holds, unless another number of heads, or other sizes, fit all the tensors."""
    part = {name: shape[f"layer.self_attn.{name}.weight"] for name in ATTENTION["mla"]}
    q_rank = _most(declared.q_lora_rank, [part["q_a_layernorm"][0], part["q_a_proj"][0], part["q_b_proj"][1]])
    kv_rank = _most(declared.kv_lora_rank, [part["kv_a_layernorm"][0], part["kv_b_proj"][1]])
    rows = (part["q_b_proj"][0], part["kv_b_proj"][0], part["o_proj"][1])
    heads, nope, rope, value = (
        declared.num_attention_heads, declared.qk_nope_head_dim, declared.qk_rope_head_dim, declared.v_head_dim
    )  # fmt: skip
    sizes = (nope + rope, nope + value, value)
    if rows != tuple(heads * size for size in sizes):
        others = {row // size if size and row % size == 0 else 0 for row, size in zip(rows, sizes, strict=True)}
        rope_here = part["kv_a_proj_with_mqa"][0] - kv_rank
        nope_here, value_here = rows[0] // heads - rope_here, rows[2] // heads
        if len(others) == 1 and 0 not in others:
            heads = others.pop()
        elif rows == tuple(heads * size for size in (nope_here + rope_here, nope_here + value_here, value_here)):
            nope, rope, value = nope_here, rope_here, value_here
    return {
        "num_attention_heads": heads, "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope, "v_head_dim": value, "head_dim": nope + rope,
    }  # fmt: skip


def _vocabulary(shape: Shapes, declared: HeadSpec, config: dict[str, Any]) -> dict[str, Any]:
    lm_head, embedding, d2t, t2d = (shape.get(name, (0,))[0] for name in OPTIONAL[:4])
    stated = declared.draft_vocab_size if config.get("draft_vocab_size") else 0
    votes = [rows for rows in (embedding, t2d) if rows]
    votes += [lm_head] if lm_head in votes else []
    votes += [] if d2t else [rows for rows in (lm_head, stated) if rows > declared.vocab_size]
    vocabulary = _most(declared.vocab_size, votes)
    draft = vocabulary
    if d2t or (lm_head != vocabulary and (stated or t2d)):
        draft = _most(stated, [rows for rows in (lm_head, d2t) if rows])
    return {
        "has_lm_head": bool(lm_head), "has_embed_tokens": bool(embedding),
        "draft_vocab_size": draft, "vocab_size": vocabulary,
    }  # fmt: skip


def _disagreements(found: dict[str, Any], declared: HeadSpec, config: dict[str, Any]) -> list[Problem]:
    """Fields whose value in config.json is not what the tensors have. A key that is absent does not disagree, except
    the size of a head, for which readers then take hidden_size / heads."""
    problems = []
    for field, value in found.items():
        mha = found["attention"] == "mha"
        stated = config.get(field) is not None if field != "head_dim" else mha
        if field in ("attention", *FLAGS) or not stated or getattr(declared, field) == value:
            continue
        message = f"config.json says {field} {getattr(declared, field)!r}, the tensors say {value!r}"
        problems.append(Problem("TS-HEAD-SHAPE", "error", f"config.json:{field}", message, REMEDY))
    for flag in FLAGS:
        problems += _flag(flag, found[flag], getattr(declared, flag))
    if found["attention"] != declared.attention:
        message = f"config.json describes {declared.attention} attention, the tensors are {found['attention']}"
        return [Problem("TS-HEAD-SHAPE", "error", "config.json:kv_lora_rank", message, REMEDY)]
    return problems


def _flag(flag: str, stored: bool, stated: bool) -> list[Problem]:
    """A norm before fc whose weights and whose key in config.json must go together."""
    where = f"config.json:{flag}"
    if stored and not stated:
        message = f"the tensors hold {flag} weights and config.json does not set {flag}, so an engine leaves them out"
        return [Problem("TS-HEAD-FC-NORM", "error", where, message, f"set `{flag}: true`")]
    if stated and not stored:
        message = f"config.json says {flag} True, but the file has no weights for that norm"
        return [Problem("TS-HEAD-FC-NORM", "error", where, message, REMEDY)]
    return []


def misfits(tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """Tensors whose shape is not the one that the record (what most tensors and config.json say) asks for."""
    problems = []
    for name, wanted in expected_shapes(spec).items():
        stored = tensors[name].shape if name in tensors else wanted
        if name in MAPS and len(stored) != 1:
            continue
        if name == "fc.weight":
            stored, wanted = stored[:1], wanted[:1]  # its inputs are judged with the layer ids
        if stored != wanted:
            message = f"{name} is stored as {list(stored)}, where the rest of the head asks for {list(wanted)}"
            problems.append(Problem("TS-HEAD-TENSOR-SHAPE", "error", name, message, REMEDY))
    return problems


def fc_width(tensors: dict[str, TensorInfo], spec: HeadSpec, config: dict[str, Any]) -> list[Problem]:
    """fc sees n_aux target states; layer ids and num_aux_hidden_states say how many those are."""
    (rows, width), states = tensors["fc.weight"].shape, spec.num_aux
    if rows != spec.hidden_size:
        return []  # not fc as a head has it, which `misfits` says
    if width != states * spec.target_hidden_size or (spec.aux_layers is not None and len(spec.aux_layers) != states):
        states = states if spec.aux_layers is None else len(spec.aux_layers)
        message = f"fc takes {width} inputs, which is not {states} captured states of width {spec.target_hidden_size}"
        return [Problem("TS-HEAD-FC-WIDTH", "error", "fc.weight", message, REMEDY)]
    stated = config.get("num_aux_hidden_states")
    if stated and stated != states:
        message = (
            f"config.json says num_aux_hidden_states {stated}, fc takes {states} states; vLLM builds fc by the key"
        )
        remedy = f"set `num_aux_hidden_states: {states}`"
        return [Problem("TS-HEAD-FC-WIDTH", "error", "config.json:num_aux_hidden_states", message, remedy)]
    return []
