"""What goes wrong silently with Eagle3 heads, found in the checkpoint alone. `pairing` looks at head and target."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtspec.checkpoint.head_shapes import REMEDY, required_names
from trtspec.checkpoint.headers import Checkpoint, TensorInfo, read_json
from trtspec.errors import Problem
from trtspec.specs import HeadSpec

FLOATS = ("BF16", "F16", "F32")
OPTIONAL = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "input_norm.weight")
KEEP_DRAFT = "convert the head again with its draft vocabulary, or train it with the full one"


def head_problems(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """Every problem beyond missing tensors and shapes; `tensors` go by their canonical names."""
    return [
        *_layout(checkpoint, tensors, spec),
        *_layer_ids(checkpoint.config, spec),
        *_function(checkpoint.config, tensors, spec),
        *_vocabulary(checkpoint, tensors, spec),
        *_rope(checkpoint.config, spec),
        *_double_norm(checkpoint, tensors, spec),
    ]


def read_values(checkpoint: Checkpoint, info: TensorInfo) -> np.ndarray:
    """A small tensor's values as float32 or its own integers, read from its bytes without torch."""
    with (checkpoint.path / info.shard).open("rb") as stream:
        stream.seek(info.begin)
        raw = stream.read(info.nbytes)
    if info.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    kinds = {"F16": "<f2", "F32": "<f4", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
    return np.frombuffer(raw, kinds[info.dtype]).reshape(info.shape)


def _layout(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    problems = []
    if any(name.startswith("model.") for name in checkpoint.tensors):
        message = "tensor names start with `model.`; TensorRT-LLM and vLLM add that themselves and then find nothing"
        problems.append(Problem("TS-HEAD-MODEL-PREFIX", "error", "tensor names", message, "drop the prefix"))
    more = sorted({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    layers = (checkpoint.config.get("num_hidden_layers") or 1) if not more else 1 + len(more)
    if layers != 1:
        message = f"the head has {layers} decoder layers; Kimi heads and the engines' MLA drafters have one"
        problems.append(Problem("TS-HEAD-LAYERS", "error", "num_hidden_layers", message, "use a one-layer head"))
    fc_norms = tuple(f"fc_norm.{index}.weight" for index in range(spec.num_aux))
    read = {*required_names(spec.attention), *OPTIONAL, *fc_norms}
    unread = [name for name in tensors if name not in read and not name.startswith("layers.")]
    qk_norms = [name for name in unread if name.endswith(("q_norm.weight", "k_norm.weight"))]
    if qk_norms:
        message = "the head normalises queries and keys; TensorRT-LLM would load it into another function"
        problems.append(Problem("TS-HEAD-QK-NORM", "error", qk_norms[0], message, "serve it with vLLM"))
    unread = [name for name in unread if name not in qk_norms]
    if unread:
        message = f"{len(unread)} tensors that no engine reads, first {unread[0]}"
        problems.append(Problem("TS-HEAD-TENSOR-UNKNOWN", "warning", unread[0], message, REMEDY))
    quantized = [name for name, info in tensors.items() if info.dtype not in FLOATS and name not in ("d2t", "t2d")]
    if quantized:
        message = f"{quantized[0]} is stored as {tensors[quantized[0]].dtype}; heads are served unquantized"
        problems.append(Problem("TS-HEAD-DTYPE", "error", quantized[0], message, "store the head in BF16"))
    return problems


def _layer_ids(config: dict[str, Any], spec: HeadSpec) -> list[Problem]:
    """Ids that start at 2 under a key that counts from 0: either a deliberate choice, or counted one too far."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not nested or spec.dialect == "vllm" or min(nested) != 2:
        return []
    message = (
        f"eagle_config lists layers {list(nested)}: layer outputs if counted from 0 (ModelOpt, TensorRT-LLM), "
        f"but {[number - 1 for number in nested]} if they count the layers that ran (vLLM, SGLang); read as "
        f"{list(spec.aux_layers or ())}"
    )
    remedy = "look which pair has the higher acceptance, `trtspec inspect HEAD --against TARGET` says what is usual"
    return [Problem("TS-HEAD-LAYER-IDS", "warning", "eagle_config", message, remedy)]


def _function(config: dict[str, Any], tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """Flags that make the trained function another one than TensorRT-LLM computes."""
    problems = []
    if "target_hidden_size" in config and config["target_hidden_size"] is None:
        message = "`target_hidden_size: null` makes loaders that only test for the key fail"
        problems.append(Problem("TS-HEAD-TARGET-HIDDEN-NULL", "error", "config.json", message, "remove the key"))
    if spec.norm_before_residual:
        stated = "norm_before_residual" in config
        message = "the residual is the normalised state (norm_before_residual), which TensorRT-LLM does not compute"
        if not stated:
            message += "; config.json does not say so, vLLM assumes it for a speculators head"
        remedy = "serve it with vLLM, or train a head with norm_before_residual=false"
        problems.append(Problem("TS-HEAD-NORM-RESIDUAL", "error", "norm_before_residual", message, remedy))
    if spec.dialect == "specforge" and config.get("norm_output") is not None:
        message = "SpecForge changed what norm_output means on 2026-09-15; read here as " + (
            "EAGLE-3.1 feedback" if spec.norm_output else "plain EAGLE-3"
        )
        remedy = "check the SpecForge version that trained the head"
        problems.append(Problem("TS-HEAD-NORM-OUTPUT", "warning", "config.json:norm_output", message, remedy))
    if spec.fc_norm and any(f"fc_norm.{index}.weight" not in tensors for index in range(spec.num_aux)):
        message = f"fc_norm needs one weight for each of the {spec.num_aux} captured states"
        problems.append(Problem("TS-HEAD-FC-NORM", "error", "fc_norm", message, REMEDY))
    return problems


def _vocabulary(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    problems = []
    pruned = spec.draft_vocab_size != spec.vocab_size
    if pruned and not checkpoint.config.get("draft_vocab_size"):
        message = f"the head drafts from {spec.draft_vocab_size} tokens and config.json has no draft_vocab_size"
        remedy = f"add `draft_vocab_size: {spec.draft_vocab_size}`"
        problems.append(Problem("TS-HEAD-DRAFT-VOCAB", "error", "config.json", message, remedy))
    if pruned and not spec.has_d2t:
        message = "the draft vocabulary is pruned and d2t is absent: engines would take the first tokens instead"
        problems.append(Problem("TS-HEAD-D2T-MISSING", "error", "d2t", message, KEEP_DRAFT))
    if pruned and not spec.has_lm_head:
        message = "the draft vocabulary is pruned and the head has no lm_head of its own"
        problems.append(Problem("TS-HEAD-LM-HEAD", "error", "lm_head.weight", message, KEEP_DRAFT))
    if "d2t" in tensors:
        problems += _d2t(read_values(checkpoint, tensors["d2t"]), spec)
    if spec.has_embed_tokens and spec.target_hidden_size == spec.hidden_size:
        message = "the head carries embed_tokens; TensorRT-LLM uses the target's and never reads these"
        remedy = "nothing to do unless the embedding was trained"
        problems.append(Problem("TS-HEAD-EMBED-OWN", "info", "embed_tokens.weight", message, remedy))
    return problems


def _d2t(offsets: np.ndarray, spec: HeadSpec) -> list[Problem]:
    """d2t holds offsets: draft token i is target token i + d2t[i], and those rise strictly within the vocabulary."""
    targets = np.arange(len(offsets)) + offsets
    inside = len(targets) == 0 or (targets.min() >= 0 and targets.max() < spec.vocab_size)
    if len(offsets) == spec.draft_vocab_size and inside and bool(np.all(np.diff(targets) > 0)):
        return []
    absolute = len(offsets) and bool(np.all(np.diff(offsets) > 0)) and offsets.max() < spec.vocab_size
    message = "d2t does not map the draft tokens to rising target tokens"
    if absolute:
        message += "; its values look like target ids where offsets are expected"
    return [Problem("TS-HEAD-D2T-VALUES", "error", "d2t", message, "store d2t[i] = target id - i")]


def _rope(config: dict[str, Any], spec: HeadSpec) -> list[Problem]:
    problems = []
    rope = spec.rope
    injected = spec.dialect == "modelopt" and rope.rope_type == "yarn"
    if injected and (rope.factor, rope.original_max_position_embeddings) == (32.0, 2048):
        message = "YaRN with factor 32 over 2048 is what ModelOpt 0.44+ writes into an export trained with plain rope"
        remedy = "if the head was trained with plain rope, set `rope_scaling: null`"
        problems.append(Problem("TS-HEAD-ROPE-INJECTED", "warning", "config.json:rope_scaling", message, remedy))
    flat = {**(config.get("transformer_layer_config") or {}), **config}
    if flat.get("rope_theta") is None:
        message = f"no rope_theta at the top level, where TensorRT-LLM reads it; it falls to 10000, not {rope.theta:g}"
        severity = "error" if rope.theta != 10000 else "warning"
        remedy = f"add `rope_theta: {rope.theta:g}`"
        problems.append(Problem("TS-HEAD-ROPE-THETA", severity, "config.json", message, remedy))  # type: ignore[arg-type]
    if spec.attention == "mla" and rope.rope_type != "yarn":
        message = "an MLA head without YaRN; TensorRT-LLM computes YaRN for every MLA draft"
        problems.append(Problem("TS-HEAD-ROPE-MLA", "error", "config.json:rope_scaling", message, REMEDY))
    return problems


def _double_norm(checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec) -> list[Problem]:
    """ModelOpt 0.41 to 0.47 trains LN(LN(x; input_layernorm); hidden_norm); engines compute LN(x; hidden_norm)."""
    gain = tensors.get("layer.input_layernorm.weight")
    provenance = checkpoint.path / "provenance.json"
    ours = provenance.is_file() and read_json(provenance).get("command") == "train"
    if spec.dialect != "modelopt" or ours or gain is None or gain.dtype not in FLOATS:
        return []
    spread = float(np.std(read_values(checkpoint, gain)))
    if spread < 1e-3:
        return []
    message = (
        f"if ModelOpt 0.41 to 0.47 trained this head with its own layers, training normalised the state twice and no "
        f"engine does; the input_layernorm gain spreads by {spread:.3f}, and the cost grows with it"
    )
    remedy = "measure acceptance with `trtspec bench`; heads from `trtspec train` are not affected"
    return [Problem("TS-HEAD-DOUBLE-NORM", "warning", "input_layernorm.weight", message, remedy)]
