"""Finds silent faults of Eagle3 heads in the checkpoint alone. `pairing` adds the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.heads.config import DTYPES, class_config, flat_config, stated_ids
from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES, training_record
from trtspec.checkpoint.heads.shapes import OPTIONAL, REMEDY, tensor_names
from trtspec.checkpoint.remote_code import read_code
from trtspec.checkpoint.target_tensors import finding
from trtspec.checkpoint.values import FLOATS, read_values, vocabulary_values
from trtspec.errors import Problem, Severity
from trtspec.specs import HeadSpec, RopeSpec, Values

# Words in class names and model types, by the attention that engines build for them.
CLASS_WORDS = {"mha": ("llama", "qwen"), "mla": ("deepseek", "kimi")}
# A name without any of these words is not known as a head's.
KNOWN_WORDS = ("eagle3", *CLASS_WORDS["mha"], *CLASS_WORDS["mla"])
EPSILONS = (1e-8, 1e-4)  # range of rms_norm_eps in published heads
WINDOW = "TensorRT-LLM 1.3 and vLLM before speculators#684 attend to all tokens"
PARALLEL = "vLLM computes it, TensorRT-LLM and SGLang draft token after token"
UNKNOWN = "no engine is known to compute it"
# For each key: the values that trtspec can compute, the effect of any other value, and how engines
# treat such a value.
DECISIVE: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "sliding_window": ((None, 0), "attention to a window", WINDOW),
    "layer_types": ((None, [], ["full_attention"]), "attention of another type", WINDOW),
    "mla_use_nope": ((None, False), "attention without rotated positions", UNKNOWN),
    "parallel_drafting": ((None, False), "several drafts in one step", PARALLEL),
    "parallel_draft_step": ((None, 1), "several drafts in one step", PARALLEL),
    "softmax_scale": ((None,), "another scale of attention", UNKNOWN),
    "attn_logit_softcapping": ((None,), "capped attention", UNKNOWN),
}
# endings of tensors that change the function of a head and that engines do not read
EXTRA_TENSORS = (".bias", "q_norm.weight", "k_norm.weight")
SILU = ("silu", "swish")
ROPE_BASE = "config.json:rope_theta"
DEFAULT_THETA = 10000.0  # base that readers assume if config.json states none
# Standard deviation of the gains of input_layernorm from which a second norm changes the state
# that is fed back by 2 %.
MIN_GAIN_SPREAD = 0.02


def head_problems(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> list[Problem]:
    """Returns every problem of a head except missing tensors and shapes.

    `tensors`: header entries by canonical name.
    """
    return [
        *_layout(checkpoint, tensors, spec),
        *_stated(checkpoint.config, tensors, spec),
        *_layer_ids(checkpoint.config, spec),
        *_function(checkpoint.config, spec),
        *uncomputed(checkpoint.config),
        *_unstated(flat_config(checkpoint.config), spec),
        *_vocabulary(spec),
        *unloadable(spec),
        *vocabulary_values(checkpoint, tensors, spec),
        *_rope(checkpoint.config, spec),
        *_double_norm(checkpoint, tensors, spec),
        *_code(checkpoint),
    ]


def _layout(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> Iterator[Problem]:
    """Yields problems of tensors that engines do not read, other layers and other dtypes."""
    if any(name.startswith("model.") for name in checkpoint.tensors):
        yield finding("TS-HEAD-MODEL-PREFIX", "tensor names")
    config = flat_config(checkpoint.config)
    read = {*tensor_names(spec), *OPTIONAL}
    unread = [name for name in tensors if name not in read and not name.startswith("layers.")]
    # The first layer is called `layer.` in canonical names.
    further_layers = {name for name in tensors if name.startswith("layers.")}
    if further_layers or config.get("num_hidden_layers", 1) != 1:
        message = (
            "the head has several decoder layers; Kimi heads and the engines' drafters have one"
        )
        yield Problem("TS-HEAD-FUNCTION", "error", "num_hidden_layers", message)
    extra = [name for name in unread if name.endswith(EXTRA_TENSORS)]
    for where, message in _other_functions(config, extra, spec):
        yield Problem("TS-HEAD-FUNCTION", "error", where, message)
    unread = [name for name in unread if not name.endswith(EXTRA_TENSORS)]
    if unread:
        message = f"{len(unread)} tensors that no engine reads, first {unread[0]}"
        yield Problem("TS-HEAD-TENSOR-UNKNOWN", "warning", unread[0], message)
    quantized = [
        name
        for name, info in tensors.items()
        if info.dtype not in FLOATS and name not in ("d2t", "t2d")
    ]
    if quantized:
        first = quantized[0]
        message = f"{first} is stored as {tensors[first].dtype}; heads are served unquantized"
        yield Problem("TS-HEAD-DTYPE", "error", first, message, "store the head in BF16")


def _other_functions(
    config: dict[str, Any], extra: list[str], spec: HeadSpec
) -> Iterator[tuple[str, str]]:
    """Yields the tensor or key, and a message, for each function that engines do not compute.

    `extra`: names of biases and of norms of queries and keys in the checkpoint.
    """
    if extra:
        message = (
            "biases, or norms of queries and keys, "
            "which engines leave out or load into another function"
        )
        yield extra[0], f"the file holds {message}: {', '.join(extra)}"
    if (config.get("hidden_act") or "silu") not in SILU:
        yield (
            "config.json:hidden_act",
            f"{config['hidden_act']!r}; every engine computes a head's MLP with SiLU",
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and not extra:
            message = (
                f"`{key}: true`, and the file holds no biases: "
                "loaders fail, or add biases that were never filled"
            )
            yield f"config.json:{key}", message
    if config.get("tie_word_embeddings") and not spec.has_lm_head:
        message = "the head drafts with its embedding; engines would borrow the target's lm_head"
        yield "config.json:tie_word_embeddings", message


def _stated(
    config: dict[str, Any], tensors: dict[str, TensorInfo], spec: HeadSpec
) -> Iterator[Problem]:
    """Yields problems of keys in config.json that engines obey and that the tensors contradict.

    `trtspec convert` corrects such keys.
    """
    stated = {**(config.get("eagle_config") or {}), **flat_config(config)}
    pruned = spec.is_pruned
    dtype = DTYPES.get(tensors["fc.weight"].dtype)
    # transformers 5 writes `dtype`, older releases write `torch_dtype`.
    dtype_key = "dtype" if "dtype" in stated and "torch_dtype" not in stated else "torch_dtype"

    def wrong(key: str, wanted: Any, effect: str, severity: Severity = "error") -> Problem:
        """Returns the problem of a key. `wanted`: right value, None if the key must be absent."""
        value = f"`{key}: {json.dumps(stated[key])}`" if key in stated else f"no {key}"
        remedy = "remove the key" if wanted is None else f"set `{key}: {json.dumps(wanted)}`"
        message = f"config.json has {value:.200}: {effect}"
        return Problem("TS-HEAD-CONFIG", severity, f"config.json:{key}", message, remedy)

    for key in ("architectures", "model_type"):
        if not _names_class(stated.get(key), spec):
            effect = (
                "engines choose a head's code by this name, "
                "and would build another layer and leave it unfilled"
            )
            yield wrong(key, class_config(spec)[key], effect)
    if stated.get("tie_word_embeddings") and spec.has_lm_head:
        yield wrong(
            "tie_word_embeddings",
            False,
            "loaders draft with the embedding in place of the head's lm_head",
        )
    if stated.get("quantization_config"):
        yield wrong(
            "quantization_config",
            None,
            "the target's it seems, and engines would apply it to the head",
        )
    if stated.get("use_aux_hidden_state") is False:
        yield wrong(
            "use_aux_hidden_state",
            True,
            "vLLM would hand the head one state, and its fc takes several",
        )
    # The key may be absent, but must not be null.
    if stated.get("target_hidden_size", 1) is None:
        yield wrong("target_hidden_size", None, "loaders that only test for the key fail")
    if pruned and not stated.get("draft_vocab_size"):
        yield wrong(
            "draft_vocab_size",
            spec.draft_vocab_size,
            "the head drafts from a part of the vocabulary only",
        )
    if not pruned and not spec.has_lm_head and stated.get("draft_vocab_size"):
        effect = (
            "without an lm_head SGLang then keeps a random one in place of the target's, "
            "and accepts nothing"
        )
        yield wrong("draft_vocab_size", None, effect, "warning")
    if dtype and str(stated.get(dtype_key)).removeprefix("torch.") != dtype:
        yield wrong(
            dtype_key,
            dtype,
            f"the weights are {dtype}; engines cast them to what it says",
            "warning",
        )


def _names_class(value: Any, spec: HeadSpec) -> bool:
    """Whether engines build a head with this attention for a class name or model type."""
    text = str(value).lower()
    other_attention = "mha" if spec.is_mla else "mla"
    known = any(word in text for word in KNOWN_WORDS)
    return known and not any(word in text for word in CLASS_WORDS[other_attention])


def _unstated(config: dict[str, Any], spec: HeadSpec) -> Iterator[Problem]:
    """Yields problems of numbers that no tensor shows, if they are absent or out of range."""
    where = "config.json:rms_norm_eps"
    epsilon = config.get("rms_norm_eps")
    if epsilon is None:
        message = f"config.json states no rms_norm_eps; readers take {spec.rms_norm_eps:g}"
        remedy = "state the one that the head was trained with; Kimi models have 1e-5"
        yield Problem("TS-HEAD-EPSILON", "warning", where, message, remedy)
    elif not EPSILONS[0] <= epsilon <= EPSILONS[1]:
        message = f"rms_norm_eps is {epsilon:g}; heads have 1e-6 or 1e-5"
        yield Problem("TS-HEAD-EPSILON", "error", where, message, REMEDY)
    if not config.get("max_position_embeddings"):
        yield finding("TS-HEAD-CONTEXT", "config.json:max_position_embeddings", "info")


def _layer_ids(config: dict[str, Any], spec: HeadSpec) -> list[Problem]:
    """Returns at most one problem of the order and the convention of the layer ids.

    Ids that start at 2 under a key that counts outputs from 0 are suspicious, because the usual
    first output is 1.
    """
    layers = spec.aux_layers or ()
    nested, top = stated_ids(config)
    if -1 in layers and -1 not in (top or nested):
        message = (
            f"layer ids {list(top or nested)} count the layers that ran; "
            "no engine passes on 0, the embedding"
        )
        return [Problem("TS-HEAD-LAYER-IDS", "error", "layer ids", message, REMEDY)]
    # Sorting puts -1 first, as TensorRT-LLM does with the final state.
    captured = sorted(set(layers))
    if list(layers) != captured:
        message = (
            f"the head lists layers {list(layers)}; engines capture each once and in ascending "
            "order, so fc would be fed other states than it was trained on"
        )
        remedy = f"list {captured}, with the columns of fc in that order"
        return [Problem("TS-HEAD-LAYER-ORDER", "error", "layer ids", message, remedy)]
    difference = DIALECTS[spec.dialect].capture(config)[1]
    if difference:
        remedy = (
            "keep the ids that the head was trained on: "
            "outputs in eagle_config, or one more at the top level"
        )
        return [Problem("TS-HEAD-LAYER-IDS", "error", "layer ids", difference, remedy)]
    if not nested or top or min(nested) != 2:
        return []
    message = (
        f"eagle_config lists layers {list(nested)}: layer outputs if counted from 0 (ModelOpt, "
        f"TensorRT-LLM), but {[number - 1 for number in nested]} if they count the layers that ran "
        f"(vLLM, SGLang); read as {list(spec.aux_layers or ())}"
    )
    remedy = (
        "compare the acceptance of both readings; "
        "`trtspec inspect HEAD --against TARGET` says what is usual"
    )
    return [Problem("TS-HEAD-LAYER-IDS", "warning", "eagle_config", message, remedy)]


def _function(config: dict[str, Any], spec: HeadSpec) -> Iterator[Problem]:
    """Yields problems of flags of norms: unusual, ambiguous, or at no key that an engine reads."""
    if spec.norm_before_residual:
        yield finding("TS-HEAD-NORM-RESIDUAL", "norm_before_residual")
    dialect = DIALECTS[spec.dialect]
    if dialect.norm_output_since and config.get("norm_output") is not None and not spec.fc_norm:
        changed = f"{dialect.title} changed what norm_output means on {dialect.norm_output_since}"
        message = f"{changed}; read here as plain EAGLE-3, because the head has no fc_norm"
        remedy = f"check the {dialect.title} version that trained the head"
        yield Problem("TS-HEAD-NORM-OUTPUT", "warning", "config.json:norm_output", message, remedy)
    elif spec.fc_norm and not spec.norm_output and not config.get("norm_output"):
        message = (
            "the head norms its captured states (fc_norm), not the state that it feeds back; "
            "EAGLE-3.1 norms both"
        )
        remedy = "set `norm_output: true` if it was trained as EAGLE-3.1"
        yield Problem("TS-HEAD-NORM-OUTPUT", "warning", "config.json:norm_output", message, remedy)
    elif spec.norm_output and not (spec.fc_norm or spec.norm_before_fc):
        message = "`norm_output: true` without a norm before fc: EAGLE-3.1 has both or neither"
        remedy = "remove norm_output if the head was trained as EAGLE-3"
        yield Problem("TS-HEAD-NORM-OUTPUT", "warning", "config.json:norm_output", message, remedy)
    stated = {key for key, value in config.items() if value}
    stated |= {
        f"eagle_config.{key}" for key, value in (config.get("eagle_config") or {}).items() if value
    }
    for engine in map(ENGINES.__getitem__, dialect.read_by):
        for flag, keys in engine.flags.items():
            if getattr(spec, flag) and stated.isdisjoint(keys):
                message = (
                    f"{engine.title} reads {flag} at {' or '.join(keys)} alone, "
                    "and would compute the head without it"
                )
                remedy = f"run `trtspec convert HEAD -o OUT --to {engine.name}`"
                yield Problem("TS-HEAD-CONFIG", "warning", f"config.json:{flag}", message, remedy)


def uncomputed(config: dict[str, Any]) -> list[Problem]:
    """Returns a warning for each key of a head's function that trtspec does not compute.

    trtspec must not run a head that has such a key.
    """
    stated = {**(config.get("eagle_config") or {}), **flat_config(config)}
    if stated.get("use_sliding_window") is False:
        stated["sliding_window"] = None  # The other key turns the window off.
    problems = []
    for key, (computed, effect, engines) in DECISIVE.items():
        value = stated.get(key)
        if value not in computed:
            message = f"`{key}: {json.dumps(value)}` means {effect}: {engines}"
            remedy = "serve it with an engine that computes this, or train a head without it"
            where = f"config.json:{key}"
            problems.append(Problem("TS-HEAD-FUNCTION", "warning", where, message, remedy))
    return problems


def _vocabulary(spec: HeadSpec) -> Iterator[Problem]:
    """Yields problems of a pruned vocabulary and of the head's own embedding."""
    pruned = spec.is_pruned
    if pruned and not spec.has_d2t:
        yield finding("TS-HEAD-D2T-MISSING", "d2t")
    if pruned and not spec.has_lm_head:
        yield finding("TS-HEAD-LM-HEAD", "lm_head.weight")
    if spec.has_embed_tokens and spec.target_hidden_size == spec.hidden_size:
        yield finding("TS-HEAD-EMBED-OWN", "embed_tokens.weight", "info")


def unloadable(spec: HeadSpec) -> Iterator[Problem]:
    """Yields a problem for each engine that cannot load the head in any layout.

    It is a warning for the engine that the head's dialect names first, and info for others.
    """
    for engine in ENGINES.values():
        reason = engine.cannot_load(spec)
        if not reason:
            continue
        first = DIALECTS[spec.dialect].read_by[:1] == (engine.name,)
        remedy = (
            f"train a head with the whole vocabulary, or an MHA head, for {engine.title}; "
            "other engines load this one"
        )
        severity: Severity = "warning" if first else "info"
        yield Problem("TS-HEAD-PRUNED-MLA", severity, "d2t", reason, remedy)


def _rope(config: dict[str, Any], spec: HeadSpec) -> Iterator[Problem]:
    """Yields problems of the settings of the rotary embedding."""
    flat = flat_config(config)
    rope = spec.rope
    yarn = rope.is_yarn
    dialect = DIALECTS[spec.dialect]
    injected = dialect.injected_rope
    # `injected` is an exporter's name and the YaRN settings that it writes into every head.
    if yarn and injected and injected[1:] == (rope.factor, rope.original_max_position_embeddings):
        yield finding("TS-HEAD-ROPE-INJECTED", "config.json:rope_scaling", "warning")
    contradictions = list(_rope_contradictions(flat))
    yield from contradictions
    if rope.theta < 1 or (yarn and (rope.factor < 1 or rope.beta_fast < rope.beta_slow)):
        message = (
            f"a rope of theta {rope.theta:g}, factor {rope.factor:g}, "
            f"beta {rope.beta_fast:g}-{rope.beta_slow:g} rotates positions as in no trained head"
        )
        yield Problem("TS-HEAD-ROPE-VALUES", "error", "config.json:rope_scaling", message)
        return
    at_top = any(ENGINES[name].theta_at_top for name in dialect.read_by)
    if flat.get("rope_theta") is None and rope.theta != DEFAULT_THETA and at_top:
        remedy = (
            f"add `rope_theta: {rope.theta:g}`; without it older TensorRT-LLM takes "
            f"{DEFAULT_THETA:g}"
        )
        yield finding("TS-HEAD-ROPE-THETA", "config.json", remedy=remedy)
    if spec.is_mla and not yarn and not contradictions:
        yield finding("TS-HEAD-ROPE-MLA", "config.json:rope_scaling")
    scaling = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    unscaled = yarn and not (scaling.get("mscale") and scaling.get("mscale_all_dim"))
    if not spec.is_mla and unscaled and not injected:
        yield finding("TS-HEAD-ROPE-MSCALE", "config.json:rope_scaling", "warning")
    if (
        spec.is_mla
        and yarn
        and dialect.fixed_rope_base
        and rope.theta != dialect.fixed_rope_base[1]
    ):
        yield finding("TS-HEAD-ROPE-TORCHSPEC", "config.json:rope_theta", "info")


def _rope_contradictions(flat: dict[str, Any]) -> Iterator[Problem]:
    """Yields differences between the keys of one config.json that state the rope.

    The keys are rope_theta, rope_scaling and rope_parameters. Engines differ in the key that they
    read.
    """
    scaling = flat.get("rope_scaling") or {}
    parameters = flat.get("rope_parameters") or {}
    thetas = set()
    for mapping in (flat, scaling, parameters):
        if mapping.get("rope_theta"):
            thetas.add(Values(mapping, "config.json").number("rope_theta"))
    if len(thetas) > 1:
        listed = " and ".join(f"{theta:g}" for theta in sorted(thetas))
        message = (
            f"config.json states rope_theta twice and differently: {listed}; "
            "engines differ in which they read"
        )
        remedy = (
            "keep the one that the head was trained with; "
            "`trtspec convert --rope-theta` writes it everywhere"
        )
        yield Problem("TS-HEAD-ROPE-TWICE", "error", ROPE_BASE, message, remedy)
    # Without one of the two keys nothing can differ.
    if "rope_scaling" not in flat or not parameters:
        return
    # An equal base, because the bases were compared above.
    first, second = (
        RopeSpec.from_config({"rope_scaling": mapping | {"rope_theta": 1.0}})
        for mapping in (scaling, parameters)
    )
    if first != second:
        differences = []
        for name in (field.name for field in fields(first)):
            value = getattr(first, name)
            other_value = getattr(second, name)
            if value != other_value:
                differences.append(f"{name} {value} and {other_value}")
        message = (
            f"rope_scaling and rope_parameters of config.json differ: {', '.join(differences)}; "
            "engines differ in which they read"
        )
        remedy = "keep the one that the head was trained with, and write it in both places"
        yield Problem("TS-HEAD-ROPE-TWICE", "error", "config.json:rope_parameters", message, remedy)


def _double_norm(
    checkpoint: Checkpoint, tensors: dict[str, TensorInfo], spec: HeadSpec
) -> list[Problem]:
    """Returns a problem if the head's trainer normed its input twice.

    Such trainers compute LN(LN(x, input_layernorm), hidden_norm), engines LN(x, hidden_norm).
    """
    gain = tensors.get("layer.input_layernorm.weight")
    # `trtspec train` writes the same dialect and norms once.
    doubled = DIALECTS[spec.dialect].double_norm and not training_record(checkpoint.path)
    if not doubled or gain is None or gain.dtype not in FLOATS:
        return []
    gains = read_values(checkpoint, gain)
    # `head_value_problems` reports gains that are not finite.
    if np.isfinite(gains).all() and float(np.std(gains)) >= MIN_GAIN_SPREAD:
        return [finding("TS-HEAD-DOUBLE-NORM", "input_layernorm.weight", "info")]
    return []


def _code(checkpoint: Checkpoint) -> list[Problem]:
    """Returns the problems of Python code in the checkpoint.

    Code is a warning, because TensorRT-LLM runs it without asking. A head needs none, because
    engines bring the classes of heads.
    """
    code = read_code(checkpoint.path)
    if not code.references:
        return code.problems
    message = (
        f"the head brings code that TensorRT-LLM runs when it loads config.json: {code.listed()}"
    )
    warning = Problem("TS-HEAD-CODE", "warning", code.references[0].where, message)
    return [*code.problems, warning]
