"""What each dialect can express of a head, and the reason for everything that it cannot."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.errors import Problem
from trtspec.specs import HeadSpec, ModelSpec

NAMES = {
    "modelopt": "TensorRT-LLM (ModelOpt's layout)", "vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators",
    "torchspec": "TorchSpec", "specforge": "SpecForge", "safeailab": "SafeAILab's EAGLE",
}  # fmt: skip
DESTINATIONS = {"trtllm": "modelopt"} | {name: name for name in NAMES}

# problems of the source that conversion itself mends, and those that only matter to some destinations
CURED = {
    "TS-HEAD-MODEL-PREFIX", "TS-HEAD-TARGET-HIDDEN-NULL", "TS-HEAD-DRAFT-VOCAB", "TS-HEAD-ROPE-THETA",
    "TS-HEAD-QUANT-CONFIG", "TS-HEAD-TORCH-DTYPE", "TS-HEAD-T2D-VALUES",
}  # fmt: skip
DEPENDS = {"TS-HEAD-NORM-RESIDUAL", "TS-HEAD-ROPE-MLA"}


@dataclass(frozen=True)
class Feature:
    """A property of some heads: who can express it, what to say to the others."""

    code: str
    where: str
    expressed_by: tuple[str, ...]
    reason: str


FEATURES = {
    "mla": Feature(
        "TS-CONVERT-MLA", "attention", ("modelopt", "vllm", "sglang", "torchspec"),
        "has no latent (MLA) attention for a draft layer",
    ),
    "mla without yarn": Feature(
        "TS-CONVERT-ROPE", "rope_scaling", ("sglang", "torchspec"),
        "computes YaRN for every MLA draft, and this head was trained with plain rope",
    ),
    "yarn": Feature(
        "TS-CONVERT-ROPE", "rope_scaling", ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge"),
        "knows linear and dynamic rope scaling only, and this head was trained with YaRN",
    ),
    "fc_norm": Feature(
        "TS-CONVERT-NORMS", "fc_norm", ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge"),
        "does not normalise the captured states (EAGLE-3.1's fc_norm); no weights can make up for it",
    ),
    "norm_output": Feature(
        "TS-CONVERT-NORMS", "norm_output", ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge"),
        "feeds back the state before its norm, and this EAGLE-3.1 head was trained on the state after it",
    ),
    "norm_output alone": Feature(
        "TS-CONVERT-NORMS", "norm_output", ("modelopt", "vllm", "sglang", "speculators", "torchspec"),
        "gave norm_output two meanings, which only a head with fc_norm tells apart",
    ),
    "norm_before_fc": Feature(
        "TS-CONVERT-NORMS", "norm_before_fc", ("modelopt", "vllm", "sglang", "speculators"),
        "has no norm over the concatenated states (norm_before_fc)",
    ),
    "norm_before_fc with mla": Feature(
        "TS-CONVERT-NORMS", "norm_before_fc", ("modelopt",),
        "applies norm_before_fc in its Llama draft only, not in the MLA one",
    ),
    "two norms before fc": Feature(
        "TS-CONVERT-NORMS", "norm_before_fc", ("vllm",),
        "applies one norm before fc, and this head has two (norm_before_fc and fc_norm)",
    ),
    "norm_before_residual": Feature(
        "TS-CONVERT-NORMS", "norm_before_residual", ("vllm", "speculators"),
        "adds attention to the state itself, and this head was trained to add it to the normalised state; neither "
        "hidden_norm nor fc can express that",
    ),
    "number of states": Feature(
        "TS-CONVERT-LAYERS", "fc.weight", ("modelopt", "vllm", "sglang", "speculators", "torchspec"),
        "fuses exactly three captured states",
    ),
    "final state": Feature(
        "TS-CONVERT-LAYERS", "layer ids", ("modelopt",), "cannot capture the state after the target's final norm (-1)",
    ),
    "first layer": Feature(
        "TS-CONVERT-LAYERS", "layer ids", ("modelopt", "vllm", "speculators", "torchspec", "specforge"),
        "takes ids that start at 1 for layer outputs, so that a head on the output of layer 0 is read one layer late",
    ),
    "head size": Feature(
        "TS-CONVERT-SHAPE", "head_dim", ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge"),
        "fixes the size of an attention head to hidden_size / heads, and this head's differs",
    ),
    "other width": Feature(
        "TS-CONVERT-SHAPE", "target_hidden_size", ("modelopt", "vllm", "sglang", "torchspec", "specforge", "safeailab"),
        "builds fc for states of the head's own width, and this target's is another",
    ),
}  # fmt: skip


def features(spec: HeadSpec) -> list[str]:
    """The entries of FEATURES that this head needs."""
    mla, yarn, layers = spec.attention == "mla", spec.rope.rope_type == "yarn", spec.aux_layers or ()
    needs = {
        "mla": mla,
        "mla without yarn": mla and not yarn,
        "yarn": yarn,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "norm_output alone": spec.norm_output and not spec.fc_norm,
        "norm_before_fc": spec.norm_before_fc,
        "norm_before_fc with mla": spec.norm_before_fc and mla,
        "two norms before fc": spec.norm_before_fc and spec.fc_norm,
        "norm_before_residual": spec.norm_before_residual,
        "number of states": spec.num_aux != 3,
        "final state": -1 in layers,
        "first layer": bool(layers) and min(layers) == 0,
        "head size": not mla and spec.head_dim * spec.num_attention_heads != spec.hidden_size,
        "other width": spec.target_hidden_size != spec.hidden_size,
    }
    return [name for name, needed in needs.items() if needed]


def refusals(spec: HeadSpec, dialect: str, target: ModelSpec | None) -> list[Problem]:
    """An error for each property of the head that `dialect` cannot express, with who can; [] when all is expressed."""
    needed = features(spec)
    problems = []
    for name in needed:
        feature = FEATURES[name]
        if dialect in feature.expressed_by:
            continue
        able = [other for other in feature.expressed_by if all(other in FEATURES[need].expressed_by for need in needed)]
        remedy = f"convert to {' or '.join(map(_option, able))}" if able else "serve the head as it is"
        message = f"{NAMES[dialect]} {feature.reason}"
        problems.append(Problem(feature.code, "error", feature.where, message, remedy))
    return problems + (_implied_layers(spec, target) if dialect == "safeailab" else [])


def _option(dialect: str) -> str:
    return "trtllm" if dialect == "modelopt" else dialect


def _implied_layers(spec: HeadSpec, target: ModelSpec | None) -> list[Problem]:
    """SafeAILab's code captures the default layers; its checkpoints hold no ids."""
    if spec.aux_layers is None or (target is not None and spec.aux_layers == target.default_aux_layers):
        return []
    where, code = "layer ids", "TS-CONVERT-LAYERS"
    if target is None:
        message = f"SafeAILab's EAGLE stores no layer ids; whether {list(spec.aux_layers)} are its own is not known"
        return [Problem(code, "error", where, message, "pass --target, so that its default layers are known")]
    message = f"SafeAILab's EAGLE always captures {list(target.default_aux_layers)}, not {list(spec.aux_layers)}"
    return [Problem(code, "error", where, message, "convert to another dialect")]


def cautions(spec: HeadSpec, dialect: str) -> list[Problem]:
    """What works, but not with every version of the destination."""
    problems = []
    if spec.eagle == "3.1":
        since = {
            "modelopt": "TensorRT-LLM from its change of June 2026 (1.3 line)", "vllm": "vLLM 0.22.0",
            "sglang": "SGLang of 2026-06", "speculators": "speculators that knows fc_norm, served by vLLM 0.22.0",
            "torchspec": "TorchSpec after its change 97", "specforge": "SpecForge after its change 879 (2026-09-15)",
        }[dialect]  # fmt: skip
        message = f"EAGLE-3.1 needs {since}; an older one computes another function and accepts little"
        problems.append(Problem("TS-CONVERT-VERSION", "info", "fc_norm, norm_output", message, "check the version"))
    if spec.norm_before_fc and dialect == "sglang":
        message = "norm_before_fc needs an SGLang with its change 32334"
        problems.append(Problem("TS-CONVERT-VERSION", "info", "norm_before_fc", message, "check the version"))
    if dialect == "torchspec" and spec.attention == "mla" and spec.rope.theta != 10000:
        message = (
            f"TorchSpec (at least to 2026-04-28) would train this head on with YaRN base 10000, not {spec.rope.theta:g}"
        )
        remedy = "fix its rope before training on; serving is not affected"
        problems.append(Problem("TS-CONVERT-THETA", "warning", "rope_theta", message, remedy))
    return problems
