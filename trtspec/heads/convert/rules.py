"""What each dialect can express of a head, and the reason for everything that it cannot."""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.checkpoint.heads.dialects import DIALECTS, Dialect, Feature
from trtspec.errors import Problem
from trtspec.specs import HeadSpec, ModelSpec

# problems of the source that conversion itself mends, and those that only matter to some destinations
CURED = {
    "TS-HEAD-MODEL-PREFIX", "TS-HEAD-TARGET-HIDDEN-NULL", "TS-HEAD-DRAFT-VOCAB", "TS-HEAD-ROPE-THETA",
    "TS-HEAD-QUANT-CONFIG", "TS-HEAD-TORCH-DTYPE", "TS-HEAD-T2D-VALUES", "TS-HEAD-CLASS", "TS-HEAD-LM-HEAD-RANDOM",
}  # fmt: skip
DEPENDS = {"TS-HEAD-NORM-RESIDUAL", "TS-HEAD-ROPE-MLA"}


@dataclass(frozen=True)
class Limit:
    """What to say of a dialect that cannot express a property of a head."""

    code: str
    where: str
    reason: str


LIMITS: dict[Feature, Limit] = {
    "mla": Limit(
        "TS-CONVERT-MLA", "attention",
        "has no latent (MLA) attention for a draft layer",
    ),
    "mla without yarn": Limit(
        "TS-CONVERT-ROPE", "rope_scaling",
        "computes YaRN for every MLA draft, and this head was trained with plain rope",
    ),
    "yarn": Limit(
        "TS-CONVERT-ROPE", "rope_scaling",
        "knows linear and dynamic rope scaling only, and this head was trained with YaRN",
    ),
    "fc_norm": Limit(
        "TS-CONVERT-NORMS", "fc_norm",
        "does not normalise the captured states (EAGLE-3.1's fc_norm); no weights can make up for it",
    ),
    "norm_output": Limit(
        "TS-CONVERT-NORMS", "norm_output",
        "feeds back the state before its norm, and this EAGLE-3.1 head was trained on the state after it",
    ),
    "norm_output alone": Limit(
        "TS-CONVERT-NORMS", "norm_output",
        "gave norm_output two meanings, which only a head with fc_norm tells apart",
    ),
    "norm_before_fc": Limit(
        "TS-CONVERT-NORMS", "norm_before_fc",
        "has no norm over the concatenated states (norm_before_fc)",
    ),
    "norm_before_fc with mla": Limit(
        "TS-CONVERT-NORMS", "norm_before_fc",
        "applies norm_before_fc in its Llama draft only, not in the MLA one",
    ),
    "two norms before fc": Limit(
        "TS-CONVERT-NORMS", "norm_before_fc",
        "applies one norm before fc, and this head has two (norm_before_fc and fc_norm)",
    ),
    "norm_before_residual": Limit(
        "TS-CONVERT-NORMS", "norm_before_residual",
        "adds attention to the state itself, and this head was trained to add it to the normalised state; neither "
        "hidden_norm nor fc can express that",
    ),
    "number of states": Limit(
        "TS-CONVERT-LAYERS", "fc.weight",
        "fuses exactly three captured states",
    ),
    "final state": Limit(
        "TS-CONVERT-LAYERS", "layer ids", "cannot capture the state after the target's final norm (-1)",
    ),
    "first layer": Limit(
        "TS-CONVERT-LAYERS", "layer ids",
        "takes ids that start at 1 for layer outputs, so that a head on the output of layer 0 is read one layer late",
    ),
    "head size": Limit(
        "TS-CONVERT-SHAPE", "head_dim",
        "fixes the size of an attention head to hidden_size / heads, and this head's differs",
    ),
    "other width": Limit(
        "TS-CONVERT-SHAPE", "target_hidden_size",
        "builds fc for states of the head's own width, and this target's is another",
    ),
    "pruned mla": Limit(
        "TS-CONVERT-PRUNED-MLA", "d2t",
        "is read by TensorRT-LLM, whose loader of MLA weights fails where a draft vocabulary is pruned (known by "
        "reading its sources, never run); for it train a head with the whole vocabulary, or an MHA head: the rows that "
        "were left out of lm_head cannot be made up",
    ),
}  # fmt: skip


def features(spec: HeadSpec) -> list[Feature]:
    """What a dialect must be able to express for this head."""
    mla, yarn, layers = spec.attention == "mla", spec.rope.rope_type == "yarn", spec.aux_layers or ()
    needs: dict[Feature, bool] = {
        "mla": mla,
        "mla without yarn": mla and not yarn,
        "pruned mla": mla and spec.draft_vocab_size != spec.vocab_size,
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


OF_MLA: tuple[Feature, ...] = ("mla without yarn", "norm_before_fc with mla", "pruned mla")


def refusals(spec: HeadSpec, dialect: Dialect, target: ModelSpec | None) -> list[Problem]:
    """An error for each property of the head that `dialect` cannot express, with who can; [] when all is expressed."""
    needed = features(spec)
    if "mla" not in dialect.expresses:
        needed = [name for name in needed if name not in OF_MLA]
    able = [row.option for row in DIALECTS.values() if row.expresses.issuperset(features(spec))]
    remedy = f"convert to {' or '.join(able)}" if able else "serve the head as it is"
    problems = [
        Problem(limit.code, "error", limit.where, f"{dialect.title} {limit.reason}", remedy)
        for limit in (LIMITS[name] for name in needed if name not in dialect.expresses)
    ]
    return problems + ([] if dialect.stores_ids else _implied_layers(spec, dialect, target))


def _implied_layers(spec: HeadSpec, dialect: Dialect, target: ModelSpec | None) -> list[Problem]:
    """A project whose checkpoints hold no ids captures the default layers."""
    if spec.aux_layers is None or (target is not None and spec.aux_layers == target.default_aux_layers):
        return []
    where, code = "layer ids", "TS-CONVERT-LAYERS"
    if target is None:
        message = f"{dialect.title} stores no layer ids; whether {list(spec.aux_layers)} are its own is not known"
        return [Problem(code, "error", where, message, "pass --target, so that its default layers are known")]
    message = f"{dialect.title} always captures {list(target.default_aux_layers)}, not {list(spec.aux_layers)}"
    return [Problem(code, "error", where, message, "convert to another dialect")]


def cautions(spec: HeadSpec, dialect: Dialect) -> list[Problem]:
    """What works, but not with every version of the destination."""
    problems = []
    if spec.eagle == "3.1":
        message = f"EAGLE-3.1 needs {dialect.eagle31}; an older one computes another function and accepts little"
        problems.append(Problem("TS-CONVERT-VERSION", "info", "fc_norm, norm_output", message, "check the version"))
    for feature in features(spec):
        if feature in dialect.since:
            message = f"{feature} needs {dialect.since[feature]}"
            problems.append(Problem("TS-CONVERT-VERSION", "info", feature, message, "check the version"))
    if dialect.mha_needs and spec.attention == "mha":
        message = f"{dialect.title} needs {dialect.mha_needs}"
        remedy = "install transformers below 5 there, or train the head on elsewhere"
        problems.append(Problem("TS-CONVERT-VERSION", "warning", "rope_theta", message, remedy))
    fixed = dialect.fixed_rope_base
    if fixed and spec.attention == "mla" and spec.rope.theta != fixed.theta:
        message = f"{fixed.trainer} would train this head on with YaRN base {fixed.theta:g}, not {spec.rope.theta:g}"
        remedy = "fix its rope before training on; serving is not affected"
        problems.append(Problem("TS-CONVERT-THETA", "warning", "rope_theta", message, remedy))
    return problems
