"""Checks config.json and hf_quant_config.json of a target against what its family publishes.

No tensor shows the values that are compared here, so a wrong value makes an engine answer nonsense
without an error. A reader replaces an absent key by its own default, and defaults differ.
DeepseekV3Config of transformers scales the routed experts by 2.5 and rotates with base 10000, but a
Kimi has 2.827 and 50000. An engine also trusts quantization_config, so a scheme that it interprets
differently produces nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from trtspec.checkpoint.headers import HF_QUANT_NAME, Checkpoint
from trtspec.checkpoint.published import catalogue
from trtspec.data_files import load_yaml
from trtspec.errors import Problem, Severity
from trtspec.families.family import Family
from trtspec.families.known import family_of
from trtspec.formats import WeightFormat, format_of_config, format_of_method
from trtspec.specs import ModelSpec, QuantSpec

# rope settings that a small model may have unlike published ones
YARN_SCALING_KEYS = ("factor", "original_max_position_embeddings")
ROPE_KEYS = (
    "rope_theta",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    *YARN_SCALING_KEYS,
)
MAX_FACTOR = 4096  # far beyond any YaRN factor
MAX_POSITIONS = 1 << 26  # far beyond any context
# sizes in vision_config, in the order in which `vision_shapes` reads them
VISION_SIZES = (
    "vt_hidden_size",
    "vt_intermediate_size",
    "text_hidden_size",
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "vt_num_attention_heads",
)
# keys of vision_config that a small vision tower may have unlike published ones
SCALED = {*VISION_SIZES, "vt_num_hidden_layers", "mm_hidden_size"}
# Keys that describe the whole model at the top level and its language model in text_config, so that
# the values may differ.
LEVEL_KEYS = (
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "_name_or_path",
    "quantization_config",
)
READERS_DIFFER = "and readers fill in different values"


def config_problems(config: dict[str, Any], spec: ModelSpec) -> list[Problem]:
    """Returns the problems of a config.json from which a ModelSpec was read."""
    text = config.get("text_config") or config
    return [
        *_nesting(config, text, spec),
        *_values(config, text, spec.family),
        *_rope(text, spec),
        *_contradictions(text, spec),
        *_two_levels(config, text, spec.family),
        *_vision(config, spec),
    ]


def _nesting(config: dict[str, Any], text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    """Yields problems if text_config, its model_type or the architecture is not the family's."""
    family = spec.family
    nested = text is not config
    text_type = text.get("model_type")
    if bool(family.text_types) != nested:
        preposition = "with" if nested else "without"
        message = f"model_type is {spec.model_type!r} {preposition} a text_config"
        yield _problem("TS-TARGET-NESTING", "text_config", message)
    elif nested and text_type not in family.text_types:
        known = ", ".join(family.text_types)
        message = f"{text_type!r} is not a Kimi text model ({known})"
        yield _problem("TS-TARGET-NESTING", "text_config.model_type", message)
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in family.classes:
        classes = " or ".join(family.classes)
        reason = f"engines load a class by this name, for this model {classes}"
        yield _problem("TS-TARGET-ARCHITECTURE", "architectures", f"{named!r:.80}: {reason}")


def _problem(code: str, key: str, message: str, severity: Severity = "error") -> Problem:
    """Returns a problem of a key in config.json."""
    return Problem(code, severity, f"config.json: {key}", message)


def _values(config: dict[str, Any], text: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Yields problems of keys that no tensor shows, at the top level and in text_config."""
    for key in (*family.optional_keys, *family.required_keys):
        stated = [level[key] for level in (config, text) if level.get(key) is not None]
        if not stated and key not in family.optional_keys:
            yield _problem("TS-TARGET-CONFIG", key, f"is absent, {READERS_DIFFER}")
        for value in stated:
            if not _is_one_of(value, _published(family)[key]):
                yield _other("TS-TARGET-CONFIG", key, value, family)
                break


def _is_one_of(value: Any, known: list[Any]) -> bool:
    """Whether a value is one of `known`.

    True is not 1, because engines distinguish them. 50000 equals 50000.0.
    """
    is_bool = isinstance(value, bool)
    return any(value == each and is_bool == isinstance(each, bool) for each in known)


@cache
def _published(family: Family) -> dict[str, list[Any]]:
    """Returns the values that the family's published text configs have, by key.

    Keys of a nested rope_scaling are included.
    """
    values: dict[str, list[Any]] = {}
    for config in _configs(family):
        text = config.get("text_config", config)
        for mapping in (text, *_rope_mappings(text)):
            for key, value in mapping.items():
                values.setdefault(key, []).append(value)
    return values


def _configs(family: Family) -> list[dict[str, Any]]:
    """Returns the published configs of this family."""
    configs = (record.config for record in catalogue().targets.values())
    return [config for config in configs if family_of(config) is family]


def _other(code: str, key: str, value: Any, family: Family) -> Problem:
    """Returns the problem of a value that the family does not publish."""
    known = dict.fromkeys(repr(each) for each in _published(family)[key])
    return _problem(code, key, f"{value!r:.60}; published Kimis have {' or '.join(known)}")


def _rope_mappings(text: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the objects with settings of the rotary embedding.

    The first holds rope_theta of the text config. rope_parameters and rope_scaling follow if they
    exist.
    """
    nested = [text[key] for key in ("rope_parameters", "rope_scaling") if text.get(key)]
    return [{"rope_theta": text.get("rope_theta")}, *nested]


def _rope(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    """Yields problems of type and settings of the rotary embedding, and of the context length."""
    code = "TS-TARGET-ROPE"
    mappings = _rope_mappings(text)
    rope_types = set()
    for mapping in mappings:
        rope_types |= {str(mapping[key]) for key in ("rope_type", "type") if mapping.get(key)}
    is_yarn = rope_types == {"yarn"}  # Two different types are not YaRN either.
    if not is_yarn:
        stated_types = " and ".join(sorted(rope_types)) or "absent"
        severity: Severity = "error" if len(mappings) > 1 else "warning"
        yield _problem(code, "rope_scaling", f"is {stated_types}; every Kimi has YaRN", severity)
    published = _published(spec.family)
    for key in ROPE_KEYS if is_yarn else ROPE_KEYS[:1]:
        stated = [mapping[key] for mapping in mappings if mapping.get(key) is not None]
        if not stated or (key in YARN_SCALING_KEYS and not all(stated)):
            yield _problem(code, key, f"is absent or zero, {READERS_DIFFER}")
        elif any(value != stated[0] for value in stated):
            message = "is given twice with different values; readers take either"
            yield _problem(code, key, message)
        elif key not in YARN_SCALING_KEYS and not _is_one_of(stated[0], published[key]):
            yield _other(code, key, stated[0], spec.family)
    if is_yarn:
        yield from _context(spec)


def _context(spec: ModelSpec) -> Iterator[Problem]:
    """Yields a problem if YaRN does not extend the positions to the stated context length.

    Also yields one if the factor or the number of positions is impossible.
    """
    factor = spec.rope.factor
    positions = spec.max_position_embeddings
    reach = factor * spec.rope.original_max_position_embeddings
    possible = 1 <= factor <= MAX_FACTOR and positions <= MAX_POSITIONS
    if reach != positions or not possible:
        reached = f"factor x original_max_position_embeddings = {reach:,.0f}"
        message = f"{positions:,}, and YaRN reaches {reached}"
        severity: Severity = "warning" if possible else "error"
        yield _problem("TS-TARGET-CONTEXT", "max_position_embeddings", message, severity)


def _contradictions(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    """Yields problems of key-value heads and active experts that contradict other keys."""
    code = "TS-TARGET-CONFIG"
    kv_heads = text.get("num_key_value_heads")
    heads = spec.num_attention_heads
    if kv_heads is None:
        yield _problem(code, "num_key_value_heads", f"is absent, {READERS_DIFFER}")
    elif kv_heads != heads:
        fact = f"num_attention_heads is {heads}; MLA has as many of both"
        yield _problem(code, "num_key_value_heads", f"{kv_heads!r:.60}, and {fact}")
    chosen = spec.num_experts_per_tok
    experts = spec.n_routed_experts
    published = _published(spec.family)
    published_experts = published[spec.family.key("n_routed_experts")]
    published_chosen = published[spec.family.key("num_experts_per_tok")]
    # A small model with another number of experts may activate any number of them.
    known = dict(zip(published_experts, published_chosen, strict=True))
    if chosen > experts or known.get(experts, chosen) != chosen:
        yield _problem(code, "num_experts_per_tok", f"{chosen} of {experts} experts")


def _two_levels(config: dict[str, Any], text: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Yields problems of keys whose values at the top level and in text_config differ.

    Engines read either level.
    """
    if config is text:
        return
    skipped = {*LEVEL_KEYS, *family.optional_keys, *family.required_keys}
    for key in sorted(config.keys() & text.keys() - skipped):
        if _as_list(config[key]) != _as_list(text[key]):
            message = f"{config[key]!r:.60} at the top level and {text[key]!r:.60} in text_config"
            yield _problem("TS-TARGET-CONFIG", key, message)


def _as_list(value: Any) -> list[Any]:
    """Returns a list unchanged, and any other value as a list of one, which means the same."""
    return value if isinstance(value, list) else [value]


def _vision(config: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    """Yields problems of vision_config's keys that no tensor shows, and of widths in two keys."""
    vision = config.get("vision_config")
    if not vision:
        return
    towers = (config.get("vision_config") for config in _configs(spec.family))
    published: dict[str, Any] = next(filter(None, towers), {})
    # Sizes of a small tower only have to exist, so its own values count as needed.
    needed = {key: vision.get(key) if key in SCALED else value for key, value in published.items()}
    # Two keys state each of these widths.
    needed |= {"text_hidden_size": spec.hidden_size, "mm_hidden_size": vision.get("vt_hidden_size")}
    for key, value in needed.items():
        stated = vision.get(key)
        if stated is None or stated != value:
            message = f"{stated!r:.60}; this model needs {value!r:.60}"
            yield _problem("TS-TARGET-CONFIG", f"vision_config.{key}", message)


def quantization_blocks(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each description of the quantization after the name of its file.

    config.json, its text_config and hf_quant_config.json may have one each.
    """
    config = checkpoint.config
    if config.get("quantization_config"):
        yield "config.json", config["quantization_config"]
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config"):
        yield "config.json: text_config", text["quantization_config"]
    quant = (checkpoint.hf_quant_config or {}).get("quantization")
    if quant:
        yield HF_QUANT_NAME, {"quant_method": WeightFormat.NVFP4.storage.method, **quant}


def scheme_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Returns problems of the descriptions of the quantization.

    They are schemes unlike published ones, descriptions that contradict each other, and a
    description that config.json lacks.
    """
    problems: list[Problem] = []
    for file, block in quantization_blocks(checkpoint):
        problems += _scheme_problems(file, block)
    return problems + _disagreements(checkpoint)


def _scheme_problems(file: str, block: dict[str, Any]) -> Iterator[Problem]:
    """Yields errors of one description of the quantization.

    Args:
        file: name of the file, for messages.
        block: the description.
    """
    code = "TS-TARGET-SCHEME"
    known = format_of_config(block)
    format = known[0] if known else format_of_method(block)
    groups = block.get("config_groups") or {}
    if format is not None and len(groups) > 1:
        message = f"{len(groups)} config_groups; which tensors each means is not read"
        yield Problem(code, "error", f"{file}: config_groups", message)
    # Each rule has a path of keys, the published values, and the effect of another value.
    rules = load_yaml("quantization_words.yaml").get(format, ())
    formats = next((rule["values"] for rule in rules if rule["path"] == "format"), None)
    if formats and block.get("format") not in formats:
        return  # The same tool has other schemes, which other checks refuse.
    for rule in rules:
        # The type is compared too, because True equals 1.
        published = [(type(value), value) for value in rule["values"]]
        for path, value in _values_at(block, rule["path"].split("."), ()):
            if (type(value), value) not in published:
                message = f"{value!r:.60} is not what published Kimis have; {rule['why']}"
                yield Problem(code, "error", f"{file}: {'.'.join(path)}", message)


def _values_at(
    value: Any, keys: list[str], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each path of keys that `keys` describes, with its value.

    `*` means every key of an object. An absent key has the value None. An absent object has no
    paths through `*`.

    `path`: keys that lead to `value`.
    """
    if not keys:
        yield path, value
        return
    mapping = value if isinstance(value, dict) else {}
    for key in mapping if keys[0] == "*" else (keys[0],):
        yield from _values_at(mapping.get(key), keys[1:], (*path, key))


def _disagreements(checkpoint: Checkpoint) -> list[Problem]:
    """Returns a problem if config.json and hf_quant_config.json state different quantizations.

    It is a warning if config.json states none, because some engines read only that file.
    Engines differ in the file that they read.
    """
    code = "TS-TARGET-QUANT-CONFIGS"
    files = [file for file, _ in quantization_blocks(checkpoint)]
    if files[-1:] != [HF_QUANT_NAME]:
        return []
    if len(files) == 1:
        effect = "engines that read only that take the weights for BF16"
        message = f"config.json has no quantization_config; {effect}"
        return [Problem(code, "warning", "config.json", message, "write it there too")]
    quant = checkpoint.hf_quant_config or {}
    in_config = QuantSpec.from_configs(checkpoint.config)
    in_modelopt = QuantSpec.from_configs({}, quant)
    names = ("format", "group_size", "kv_cache", "layers")
    differing = [name for name in names if getattr(in_config, name) != getattr(in_modelopt, name)]
    if set(in_config.exclude) != set(in_modelopt.exclude):
        differing.append("exclude list")
    if not differing:
        return []
    message = f"config.json and {HF_QUANT_NAME} disagree on {', '.join(differing)}"
    remedy = "make them agree; engines differ in which one they read"
    return [Problem(code, "error", HF_QUANT_NAME, message, remedy)]
