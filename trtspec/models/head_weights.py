"""Loads an Eagle3 head checkpoint into `Eagle3Head`: strict, all misfits in one message."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from trtspec.checkpoint.dialects import head_spec
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import TrtspecError
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.kimi import KimiModel
from trtspec.models.layers import Linear
from trtspec.specs import HeadSpec


class Tensors(Protocol):
    """Tensors by name: a dict, or LazyTensors."""

    def __contains__(self, name: str, /) -> bool: ...

    def __getitem__(self, name: str, /) -> Tensor: ...


OPTIONAL = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")


def load_head(
    path: Path | str, target: KimiModel, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Eagle3Head:
    """Builds the head for `target`, which lends its embedding, and its lm_head when the file has none.

    Reads ModelOpt's names (`layers.0.`) and `midlayer.`. Raises TrtspecError with every misfit at once, and refuses a
    head whose function the servers do not compute (norm_before_residual).
    """
    checkpoint = Checkpoint.open(Path(path))
    spec = head_spec(checkpoint)
    problems = _unfit(spec, target) + _misfits(checkpoint, spec)
    if problems:
        raise TrtspecError(
            f"{path} cannot draft for this target: {'; '.join(problems)}",
            f"run `trtspec inspect {path} --against TARGET`",
        )
    tensors = LazyTensors(checkpoint)
    head = assemble(spec, tensors, target, dtype=dtype, device=device)
    tensors.close()
    return head


def assemble(
    spec: HeadSpec, tensors: Tensors, target: KimiModel, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> Eagle3Head:
    """The head of shape `spec` from tensors by their checkpoint names (a dict, or LazyTensors)."""
    with torch.device("meta"):
        head = Eagle3Head(spec)
    for parameter, names in layout(spec).items():
        parts = [tensors[name] for name in names]
        owner, _, leaf = parameter.rpartition(".")
        value = torch.stack(parts) if parameter == "fc_norm" else torch.cat(parts) if len(parts) > 1 else parts[0]
        setattr(head.get_submodule(owner), leaf, nn.Parameter(value.to(device=device, dtype=dtype), False))
    _attach(head, tensors, target, dtype, device)
    return head.eval().requires_grad_(False)


def layout(spec: HeadSpec) -> dict[str, tuple[str, ...]]:
    """Parameter of `Eagle3Head` -> the checkpoint tensors stacked into it along dimension 0; all are required."""
    layer = spec.layer_prefix
    attention = ("q_proj", "k_proj", "v_proj")
    fused = {"self_attn.qkv_proj": attention}
    plain = ["self_attn.o_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.down_proj"]
    if spec.attention == "mla":
        fused = {"self_attn.qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
        plain += [f"self_attn.{name}" for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")]
    table = {"fc.weight": ("fc.weight",), "norm.weight": ("norm.weight",)}
    table |= {f"{name}.weight": (f"{layer}{name}.weight",) for name in plain}
    table |= {
        f"{ours}.weight": tuple(f"{layer}self_attn.{name}.weight" for name in names) for ours, names in fused.items()
    }
    table["mlp.gate_up_proj.weight"] = (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight")
    if spec.fc_norm:
        table["fc_norm"] = tuple(f"fc_norm.{i}.weight" for i in range(spec.num_aux))
    if spec.norm_before_fc:
        table["input_norm.weight"] = ("input_norm.weight",)
    return table


def expected_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every required and optional tensor of a head, by its name in the checkpoint."""
    hidden, captured, layer = spec.hidden_size, spec.num_aux * spec.target_hidden_size, spec.layer_prefix
    inner, heads = spec.intermediate_size, spec.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, captured),
        "norm.weight": (hidden,),
        "lm_head.weight": (spec.draft_vocab_size, hidden),
        "embed_tokens.weight": (spec.vocab_size, hidden),
        "d2t": (spec.draft_vocab_size,),
        "t2d": (spec.vocab_size,),
        "input_norm.weight": (captured,),
    }
    shapes |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(spec.num_aux)}
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if spec.attention == "mla":
        nope, rope, value = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
        block |= {
            "self_attn.q_a_proj": (spec.q_lora_rank, 2 * hidden),
            "self_attn.q_a_layernorm": (spec.q_lora_rank,),
            "self_attn.q_b_proj": (heads * (nope + rope), spec.q_lora_rank),
            "self_attn.kv_a_proj_with_mqa": (spec.kv_lora_rank + rope, 2 * hidden),
            "self_attn.kv_a_layernorm": (spec.kv_lora_rank,),
            "self_attn.kv_b_proj": (heads * (nope + value), spec.kv_lora_rank),
            "self_attn.o_proj": (hidden, heads * value),
        }
    else:
        keys = spec.num_key_value_heads * spec.head_dim
        block |= {
            "self_attn.q_proj": (heads * spec.head_dim, 2 * hidden),
            "self_attn.k_proj": (keys, 2 * hidden),
            "self_attn.v_proj": (keys, 2 * hidden),
            "self_attn.o_proj": (hidden, heads * spec.head_dim),
        }
    return shapes | {f"{layer}{name}.weight": shape for name, shape in block.items()}


def _unfit(spec: HeadSpec, target: KimiModel) -> list[str]:
    """Why this head's function or widths rule it out for the target."""
    problems = []
    if spec.norm_before_residual:
        problems.append(
            "TS-HEAD-NORM-BEFORE-RESIDUAL it was trained with the normed state as residual, which TensorRT-LLM does not "
            "compute and no change of weights can express"
        )
    if spec.target_hidden_size != target.spec.hidden_size:
        problems.append(
            f"TS-HEAD-TARGET-WIDTH fc expects states of width {spec.target_hidden_size}, the target's are "
            f"{target.spec.hidden_size}"
        )
    if spec.vocab_size != target.spec.vocab_size:
        problems.append(f"TS-HEAD-VOCAB vocab_size {spec.vocab_size}, the target's is {target.spec.vocab_size}")
    if not spec.has_d2t and spec.draft_vocab_size != spec.vocab_size:
        problems.append(
            f"TS-HEAD-D2T-MISSING {spec.draft_vocab_size} draft tokens of {spec.vocab_size} and no d2t to name them"
        )
    layers = spec.aux_layers or ()
    if any(layer >= target.spec.num_hidden_layers for layer in layers):
        problems.append(
            f"TS-HEAD-AUX-LAYERS capture layers {list(layers)}, the target has {target.spec.num_hidden_layers} layers"
        )
    return problems


def _misfits(checkpoint: Checkpoint, spec: HeadSpec) -> list[str]:
    shapes = expected_shapes(spec)
    required = [name for names in layout(spec).values() for name in names]
    problems = [f"TS-HEAD-TENSOR-MISSING {name}" for name in required if name not in checkpoint.tensors]
    for name, info in checkpoint.tensors.items():
        if name not in required and name not in OPTIONAL:
            problems.append(f"TS-HEAD-TENSOR-UNKNOWN {name}")
        elif tuple(info.shape) != shapes[name]:
            problems.append(f"TS-HEAD-TENSOR-SHAPE {name} is {tuple(info.shape)}, config.json implies {shapes[name]}")
    return problems


def _attach(head: Eagle3Head, tensors: Tensors, target: KimiModel, dtype: torch.dtype, device: str) -> None:
    """lm_head, embedding and vocabulary map: the head's own where it has them, else the target's."""
    spec = head.spec

    def own(name: str) -> Tensor | None:
        return tensors[name].to(device=device, dtype=dtype) if name in tensors else None

    if (weight := own("lm_head.weight")) is not None:
        head.set_lm_head(_linear(weight))
    elif spec.draft_vocab_size == target.spec.vocab_size and spec.hidden_size == target.spec.hidden_size:
        head.set_lm_head(target.lm_head)
    else:
        raise TrtspecError(
            "TS-HEAD-LM-HEAD-MISSING the head has no lm_head and the target's does not fit its draft vocabulary",
            "export the head again with its lm_head",
        )
    if (weight := own("embed_tokens.weight")) is not None:
        head.embed = nn.Embedding.from_pretrained(weight)
    else:
        head.set_embedding(target.embed)
    if "d2t" in tensors and spec.draft_vocab_size != spec.vocab_size:
        _check_vocabulary(tensors["d2t"], spec)
        head.set_draft_vocabulary(tensors["d2t"].to(device))


def _linear(weight: Tensor) -> Linear:
    linear = Linear(*reversed(weight.shape))
    linear.weight = nn.Parameter(weight, False)
    return linear


def _check_vocabulary(d2t: Tensor, spec: HeadSpec) -> None:
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size or len(ids.unique()) != len(ids):
        raise TrtspecError(
            "TS-HEAD-D2T-RANGE d2t does not map the draft vocabulary to different target ids",
            "d2t holds offsets (target id - draft id), not ids; rebuild it from the training vocabulary",
        )
