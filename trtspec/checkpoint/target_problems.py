"""Whether a checkpoint is a target or a head, and what is wrong with a target, without reading a weight.

`trtspec inspect` prints these findings; every command that is about to spend time on a target asks for them first
(`require_target`) and refuses what has an error among them.

Values of config.json that no tensor's shape can contradict are compared with the family's. A reader fills in what is
absent with its own default, and readers differ: DeepseekV3Config of transformers scales the routed experts by 2.5 and
rotates with base 10000 where a Kimi says 2.827 and 50000.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import INDEX_NAME, POINTER, Checkpoint, missing_numbers, read_json
from trtspec.checkpoint.heads.dialects import recorded
from trtspec.checkpoint.target_tensors import coverage_problems, scheme_problems, tensor_problems
from trtspec.errors import Problem, Severity, TrtspecError
from trtspec.files import open_regular
from trtspec.formats import WeightFormat
from trtspec.specs import ModelSpec, RopeSpec, Values

SHOWN = 3  # further errors that a refusal names
FROM_BASE = "copy it from the base model's repository"


@dataclass(frozen=True)
class ReadTarget:
    """A target opened by its headers. `formats`: how each linear that is there is stored, by module."""

    checkpoint: Checkpoint
    spec: ModelSpec
    formats: dict[str, WeightFormat]
    problems: list[Problem]


def read_target(path: Path | str | Checkpoint) -> ReadTarget:
    """Opens a target and gathers every finding of its headers and files.

    Raises TrtspecError, with a code, for what cannot be read at all: broken shards, an index that is not theirs, a
    config.json of another model or in an unknown scheme.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    scheme = scheme_problems(checkpoint)
    try:
        spec = target_spec(checkpoint)
    except TrtspecError:
        if scheme:  # says which word of the scheme it is
            raise refusal(checkpoint.path, scheme) from None
        raise
    tensors, formats = tensor_problems(checkpoint, spec)
    problems = [
        *tensors,
        *scheme,
        *coverage_problems(checkpoint, spec, formats),
        *config_problems(checkpoint.config, spec),
        *_shards(checkpoint),
        *_files(checkpoint.path, checkpoint.config),
        *_end_of_text(checkpoint.path, spec),
        *_noted(checkpoint.path),
    ]
    return ReadTarget(checkpoint, spec, formats, problems)


def require_target(path: Path | str | Checkpoint) -> ReadTarget:
    """A target without errors; raises TrtspecError with the code of the first one."""
    target = read_target(path)
    if any(problem.severity == "error" for problem in target.problems):
        raise refusal(target.checkpoint.path, target.problems)
    return target


def refusal(path: Path, problems: list[Problem]) -> TrtspecError:
    """The first error, and how to see the others."""
    errors = [problem for problem in problems if problem.severity == "error"]
    first, others = errors[0], errors[1 : 1 + SHOWN]
    named = ", ".join(f"{problem.code} {problem.where}" for problem in others)
    more = f" (and {len(errors) - 1} more: {named})" if others else ""
    message = f"{path}: {first.where}: {first.message} [{first.code}]{more}"
    return TrtspecError(message, f"{first.remedy}; `trtspec inspect {path}` lists all", first.code)


def _noted(path: Path) -> list[Problem]:
    """What `trtspec quantize` found in the bytes of its source, which the quantized ones show no more."""
    problems = []
    for one in recorded(path).get("problems") or ():
        code, where, message, remedy = (str(one.get(key, "")) for key in ("code", "where", "message", "remedy"))
        severity: Severity = "error" if one.get("severity") == "error" else "warning"
        problems.append(Problem(code, severity, where, f"noted when this checkpoint was quantized: {message}", remedy))
    return problems


def _shards(checkpoint: Checkpoint) -> list[Problem]:
    """Weight files beside those that were read: an engine that takes every file of the directory reads them too."""
    path, problems = checkpoint.path, []
    strays = sorted(file.name for file in path.glob("*.safetensors") if file.name not in checkpoint.shards)
    if strays:
        why = f"{INDEX_NAME} does not name" if (path / INDEX_NAME).is_file() else "accompany model.safetensors"
        message = f"{len(strays)} weight files that {why}, first {strays[0]}; some loaders read them too"
        problems.append(Problem("TS-INDEX-STRAY", "warning", strays[0], message, "move them away"))
    unfinished = [f"{shard}.aria2" for shard in checkpoint.shards if (path / f"{shard}.aria2").is_file()]
    if unfinished:
        message = f"{unfinished[0]} says that a download has not filled its shard yet"
        remedy = "wait for the download to end, or start it again"
        problems.append(Problem("TS-SHARD-PARTIAL", "error", unfinished[0], message, remedy))
    absent = missing_numbers(checkpoint.shards)
    if absent:
        message = f"{len(absent)} numbers are missing in the names of the shards, first {absent[0]}; the index is whole"
        problems.append(Problem("TS-SHARD-NUMBERS", "info", absent[0], message))
    return problems


def _files(path: Path, config: dict[str, Any]) -> list[Problem]:
    problems = []
    if not (path / "tiktoken.model").is_file() and not (path / "tokenizer.json").is_file():
        message = "no tokenizer (tiktoken.model); copying only *.json and *.py loses it"
        problems.append(Problem("TS-TARGET-TOKENIZER", "warning", "tiktoken.model", message, FROM_BASE))
    elif (path / "tiktoken.model").is_file() and _is_pointer(path / "tiktoken.model"):
        message, remedy = "tiktoken.model is a Git LFS pointer, not the vocabulary", "run `git lfs pull` there"
        problems.append(Problem("TS-TARGET-TOKENIZER", "warning", "tiktoken.model", message, remedy))
    tokenizer = path / "tokenizer_config.json"
    inline = tokenizer.is_file() and "chat_template" in read_json(tokenizer)
    if not inline and not (path / "chat_template.jinja").is_file():
        message = "no chat template: chat requests fail or use another model's"
        problems.append(Problem("TS-TARGET-TEMPLATE", "warning", "chat_template.jinja", message, FROM_BASE))
    modules = {
        reference.split(".")[0] + ".py"
        for reference in (config.get("auto_map") or {}).values()
        if isinstance(reference, str)
    }
    absent = sorted(name for name in modules if not (path / name).is_file())
    if absent:
        message = f"config.json names remote code that is not here: {', '.join(absent)}"
        problems.append(Problem("TS-TARGET-REMOTE-CODE", "warning", absent[0], message, FROM_BASE))
    return problems


def _is_pointer(path: Path) -> bool:
    with open_regular(path) as stream:
        return stream.read(len(POINTER)) == POINTER


def _end_of_text(path: Path, spec: ModelSpec) -> list[Problem]:
    """The family changed its end-of-text id between K2.5 and K2.6; generation_config.json wins in most engines."""
    generation = path / "generation_config.json"
    if not generation.is_file() or not spec.eos_token_ids:
        return []
    ids = Values(read_json(generation), generation.name).wholes("eos_token_id", or_one=True)
    if not ids or set(spec.eos_token_ids) & set(ids):
        return []
    message = f"generation_config.json ends text at {list(ids)}, config.json at {list(spec.eos_token_ids)}"
    remedy = "answers may run on; take the ids of the model's repository"
    return [Problem("TS-TARGET-EOS", "warning", "generation_config.json", message, remedy)]


REMEDY = "take config.json from the model's repository"
# key -> what engines compute for every Kimi; an absent key means the same
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "num_nextn_predict_layers": (0,),
    "norm_topk_prob": (True,),
}
NEEDED = ("num_key_value_heads", "routed_scaling_factor", "norm_topk_prob", "n_group", "topk_group", "rms_norm_eps")
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# key -> least and most that a trained model can have
RANGES = {"rms_norm_eps": (1e-9, 1e-2), "routed_scaling_factor": (0.01, 100.0)}
ROPE_RANGES = {
    "theta": (100.0, 1e9), "factor": (1.0, 4096.0), "beta_fast": (0.1, 1024.0), "beta_slow": (0.01, 1024.0),
    "mscale": (0.0, 16.0), "mscale_all_dim": (0.0, 16.0),
}  # fmt: skip
MOST_POSITIONS = 1 << 26
CLASSES = {False: ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"), True: ("KimiK25ForConditionalGeneration",)}
TEXT_TYPES = ("kimi_k2", "deepseek_v3")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_problems(config: dict[str, Any], spec: ModelSpec) -> list[Problem]:
    """Of a config.json that a ModelSpec could be read from."""
    nested = bool(config.get("text_config"))
    text = config["text_config"] if nested else config
    return [*_nesting(config, text, nested), *_fixed(config, text), *_sizes(text, spec), *_rope(text, spec),
            *_tokens(config, text, spec), *_vision(config, spec)]  # fmt: skip


def _problem(code: str, key: str, message: str, severity: Any = "error") -> Problem:
    return Problem(code, severity, f"config.json: {key}", message, REMEDY)


def _nesting(config: dict[str, Any], text: dict[str, Any], nested: bool) -> Iterator[Problem]:
    if (config.get("model_type") == "kimi_k25") != nested:
        message = f"model_type is {config.get('model_type')!r} {'with' if nested else 'without'} a text_config"
        yield _problem("TS-TARGET-NESTING", "text_config", message)
    if nested and text.get("model_type") not in TEXT_TYPES:
        message = f"{text.get('model_type')!r} is not a Kimi text model ({', '.join(TEXT_TYPES)})"
        yield _problem("TS-TARGET-NESTING", "text_config.model_type", message)
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in CLASSES[nested]:
        message = f"{named!r:.80}: engines load a class by this name, for this model {' or '.join(CLASSES[nested])}"
        yield _problem("TS-TARGET-ARCHITECTURE", "architectures", message)


def _fixed(config: dict[str, Any], text: dict[str, Any]) -> Iterator[Problem]:
    for key, values in FIXED.items():
        value = text.get(key)
        if value is not None and not any(type(value) is type(known) and value == known for known in values):
            yield _problem("TS-TARGET-CONFIG", key, f"{value!r:.60}; every Kimi has {values[0]!r}")
    for key in NEEDED:
        if text.get(key) is None:
            yield _problem("TS-TARGET-CONFIG", key, "is absent, and readers fill in different values")
    for place in (config, text):
        tied = place.get("tie_word_embeddings")
        if tied not in (None, False):
            message = f"{tied!r:.60}: loaders would use the embedding in place of lm_head"
            yield _problem("TS-TARGET-TIED", "tie_word_embeddings", message)
            break


def _sizes(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    heads = text.get("num_key_value_heads")
    if heads is not None and heads != spec.num_attention_heads:
        message = f"{heads!r:.60}, and num_attention_heads is {spec.num_attention_heads}; MLA has as many of both"
        yield _problem("TS-TARGET-CONFIG", "num_key_value_heads", message)
    if spec.qk_rope_head_dim % 2:
        yield _problem("TS-TARGET-CONFIG", "qk_rope_head_dim", f"{spec.qk_rope_head_dim} is odd; pairs are rotated")
    if spec.num_experts_per_tok > spec.n_routed_experts:
        message = f"{spec.num_experts_per_tok} of {spec.n_routed_experts} experts"
        yield _problem("TS-TARGET-CONFIG", "num_experts_per_tok", message)
    groups, chosen = text.get("n_group"), text.get("topk_group")
    if groups is not None and (groups < 1 or spec.n_routed_experts % groups):
        yield _problem("TS-TARGET-CONFIG", "n_group", f"{groups} groups of {spec.n_routed_experts} experts")
    if chosen is not None and not 1 <= chosen <= spec.n_group:
        yield _problem("TS-TARGET-CONFIG", "topk_group", f"{chosen} of {spec.n_group} groups")
    if spec.max_position_embeddings > MOST_POSITIONS:
        yield _problem("TS-TARGET-CONFIG", "max_position_embeddings", f"{spec.max_position_embeddings:,} positions")
    for key, (least, most) in RANGES.items():
        if text.get(key) is not None and not least <= getattr(spec, key) <= most:
            yield _problem("TS-TARGET-CONFIG", key, f"{getattr(spec, key)!r} is outside {least:g} to {most:g}")


def _rope(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    told = [text[key] for key in ("rope_parameters", "rope_scaling") if text.get(key)]
    scaling = told[0] if told else {}
    kinds = {str(place[key]) for place in told for key in ("rope_type", "type") if place.get(key)}
    bases = {str(place["rope_theta"]) for place in (text, *told) if place.get("rope_theta") is not None}
    if len(kinds) > 1 or len(bases) > 1 or len(told) > 1 and _differ(*told):
        yield _problem("TS-TARGET-ROPE", "rope_scaling", "is given twice with different values; readers take either")
    if not bases:
        yield _problem("TS-TARGET-ROPE", "rope_theta", "is absent, and readers take 10000")
    for key, (least, most) in ROPE_RANGES.items():
        if not least <= getattr(spec.rope, key) <= most:
            message = f"{getattr(spec.rope, key)!r} is outside {least:g} to {most:g}"
            yield _problem("TS-TARGET-ROPE", f"rope {key}", message)
    if kinds != {"yarn"}:
        message = f"is {' and '.join(sorted(kinds)) or 'absent'}; every Kimi has YaRN"
        yield _problem("TS-TARGET-ROPE", "rope_scaling", message, "error" if told else "warning")
        return
    for key in YARN:
        if scaling.get(key) is None or key in YARN[:2] and not scaling[key]:
            message = "is absent or zero, and readers fill in different values"
            yield _problem("TS-TARGET-ROPE", f"rope_scaling.{key}", message)
    yield from _context(spec.rope, spec.max_position_embeddings)


def _context(rope: RopeSpec, positions: int) -> Iterator[Problem]:
    if rope.beta_fast < rope.beta_slow:
        message = f"beta_fast {rope.beta_fast} is below beta_slow {rope.beta_slow}"
        yield _problem("TS-TARGET-ROPE", "rope_scaling", message)
    reach = rope.factor * rope.original_max_position_embeddings
    if reach != positions:
        message = f"{positions:,}, and YaRN reaches factor x original_max_position_embeddings = {reach:,.0f}"
        yield _problem("TS-TARGET-CONTEXT", "max_position_embeddings", message, "warning")


def _differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return any(first[key] != second[key] for key in first.keys() & second.keys())


def _tokens(config: dict[str, Any], text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    for key, listed in zip(TOKEN_IDS, ((spec.bos_token_id,), spec.eos_token_ids, (spec.pad_token_id,)), strict=True):
        beyond = [number for number in listed if number is not None and not 0 <= number < spec.vocab_size]
        if beyond:
            yield _problem("TS-TARGET-CONFIG", key, f"{beyond} is not below vocab_size {spec.vocab_size}")
        outer, inner = config.get(key), text.get(key)
        if outer is not None and inner is not None and outer != inner:
            message = f"{outer} at the top level and {inner} in text_config"
            yield _problem("TS-TARGET-TOKEN-IDS", key, message, "warning")
    if not spec.eos_token_ids:
        yield _problem("TS-TARGET-TOKEN-IDS", "eos_token_id", "is absent: answers end only at their limit", "warning")


def _vision(config: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    vision = config.get("vision_config")
    width = vision.get("text_hidden_size") if isinstance(vision, dict) else None
    if width is not None and width != spec.hidden_size:
        message = f"{width!r:.60}, and the text model's hidden_size is {spec.hidden_size}"
        yield _problem("TS-TARGET-CONFIG", "vision_config.text_hidden_size", message)


EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
Kind = Literal["target", "head"]


def detect(path_or_checkpoint: Path | str | Checkpoint) -> Kind:
    """`target` or `head`, tensors first: a head fuses captured states (`fc`), a target has routed experts."""
    given = path_or_checkpoint
    checkpoint = given if isinstance(given, Checkpoint) else Checkpoint.open(given)
    if "fc.weight" in checkpoint.tensors or "model.fc.weight" in checkpoint.tensors:
        return "head"
    if any(EXPERT.search(name) for name in checkpoint.tensors):
        return "target"
    return config_kind(checkpoint.config, str(checkpoint.path))


def config_kind(config: dict[str, Any], name: str) -> Kind:
    """The same from config.json alone; raises TrtspecError when it is neither."""
    architecture = (config.get("architectures") or [""])[0]
    head_keys = ("eagle_config", "draft_vocab_size", "speculators_model_type", "transformer_layer_config")
    if "Eagle3" in architecture or any(key in config for key in head_keys):
        return "head"
    if config.get("num_hidden_layers") == 1:
        return "head"
    if config.get("model_type") in ("kimi_k2", "kimi_k25", "deepseek_v3", "kimi_k3", "kimi_linear"):
        return "target"
    raise TrtspecError(
        f"{name} is neither a Kimi-K2 target nor an Eagle3 head (model_type {config.get('model_type')!r}, "
        f"architecture {architecture!r})",
        "pass a K2, K2-Thinking, K2.5, K2.6 or K2.7-Code checkpoint, or an Eagle3 head of one",
    )


def target_spec(checkpoint: Checkpoint) -> ModelSpec:
    """ModelSpec of an opened target; its config.json and hf_quant_config.json decide."""
    return ModelSpec.from_config(checkpoint.config, checkpoint.hf_quant_config)
