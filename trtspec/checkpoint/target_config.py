"""config.json and hf_quant_config.json of a target, judged as a difference from what the family publishes.

No tensor shows the values that are compared here, so a wrong one serves nonsense without an error message. A reader
fills in an absent key with its own default, and readers differ: DeepseekV3Config of transformers scales the routed
experts by 2.5 and rotates with base 10000 where a Kimi says 2.827 and 50000. An engine also believes
quantization_config: a scheme that is read in another way than it was written produces nonsense.
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

STRETCH = (
    "factor",
    "original_max_position_embeddings",
)  # of YaRN; a small model has others than published ones
ROPE = ("rope_theta", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", *STRETCH)
MOST_FACTOR, MOST_POSITIONS = 4096, 1 << 26  # beyond what any YaRN reaches
VISION_SIZES = ("vt_hidden_size", "vt_intermediate_size", "text_hidden_size", "patch_size", "init_pos_emb_height",
                "init_pos_emb_width", "vt_num_attention_heads")  # fmt: skip
# a small tower has others than published ones
SCALED = {*VISION_SIZES, "vt_num_hidden_layers", "mm_hidden_size"}
# keys that mean the whole model at the top level and its language model in text_config, as those do that are computed
OF_A_LEVEL = ("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path",
              "quantization_config")  # fmt: skip


def config_problems(config: dict[str, Any], spec: ModelSpec) -> list[Problem]:
    """Of a config.json that a ModelSpec could be read from."""
    text = config.get("text_config") or config
    return [*_nesting(config, text, spec), *_values(config, text, spec.family), *_rope(text, spec),
            *_contradictions(text, spec), *_two_levels(config, text, spec.family), *_vision(config, spec)]  # fmt: skip


def _configs(family: Family) -> list[dict[str, Any]]:
    """The published ones of this family alone."""
    configs = (record.config for record in catalogue().targets.values())
    return [config for config in configs if family_of(config) is family]


@cache
def _published(family: Family) -> dict[str, list[Any]]:
    """Key -> its values in the text configs that a family publishes, those of a nested rope_scaling among them."""
    found: dict[str, list[Any]] = {}
    for config in _configs(family):
        text = config.get("text_config", config)
        for place in (text, *_rope_places(text)):
            for key, value in place.items():
                found.setdefault(key, []).append(value)
    return found


def _problem(code: str, key: str, message: str, severity: Severity = "error") -> Problem:
    return Problem(code, severity, f"config.json: {key}", message)


def _nesting(config: dict[str, Any], text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    family, nested = spec.family, text is not config
    if bool(family.text_types) != nested:
        message = (
            f"model_type is {spec.model_type!r} {'with' if nested else 'without'} a text_config"
        )
        yield _problem("TS-TARGET-NESTING", "text_config", message)
    elif nested and text.get("model_type") not in family.text_types:
        known = ", ".join(family.text_types)
        message = f"{text.get('model_type')!r} is not a Kimi text model ({known})"
        yield _problem("TS-TARGET-NESTING", "text_config.model_type", message)
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in family.classes:
        message = f"{named!r:.80}: engines load a class by this name, for this model {' or '.join(family.classes)}"
        yield _problem("TS-TARGET-ARCHITECTURE", "architectures", message)


def _values(config: dict[str, Any], text: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Each key that no tensor shows, at the top level and in text_config."""
    for key in (*family.optional_keys, *family.required_keys):
        stated = [place[key] for place in (config, text) if place.get(key) is not None]
        if not stated and key not in family.optional_keys:
            yield _problem(
                "TS-TARGET-CONFIG", key, "is absent, and readers fill in different values"
            )
        for value in stated:
            if not _is_one_of(value, _published(family)[key]):
                yield _other("TS-TARGET-CONFIG", key, value, family)
                break


def _is_one_of(value: Any, known: list[Any]) -> bool:
    """Python takes True for 1, and engines do not; 50000 and 50000.0 are one base."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in known
    )


def _other(code: str, key: str, value: Any, family: Family) -> Problem:
    published = " or ".join(dict.fromkeys(repr(each) for each in _published(family)[key]))
    return _problem(code, key, f"{value!r:.60}; published Kimis have {published}")


def _rope_places(text: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of the rotary embedding in each of their places, those of transformers 5 first."""
    return [{"rope_theta": text.get("rope_theta")}, *(text[key] for key in ("rope_parameters", "rope_scaling")
                                                      if text.get(key))]  # fmt: skip


def _rope(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    places = _rope_places(text)
    kinds = {str(place[key]) for place in places for key in ("rope_type", "type") if place.get(key)}
    if kinds != {"yarn"}:
        message = f"is {' and '.join(sorted(kinds)) or 'absent'}; every Kimi has YaRN"
        yield _problem(
            "TS-TARGET-ROPE", "rope_scaling", message, "error" if len(places) > 1 else "warning"
        )
    for key in ROPE if kinds == {"yarn"} else ROPE[:1]:
        stated = [place[key] for place in places if place.get(key) is not None]
        if not stated or (key in STRETCH and not all(stated)):
            yield _problem(
                "TS-TARGET-ROPE", key, "is absent or zero, and readers fill in different values"
            )
        elif any(value != stated[0] for value in stated):
            yield _problem(
                "TS-TARGET-ROPE", key, "is given twice with different values; readers take either"
            )
        elif key not in STRETCH and not _is_one_of(stated[0], _published(spec.family)[key]):
            yield _other("TS-TARGET-ROPE", key, stated[0], spec.family)
    factor, positions = spec.rope.factor, spec.max_position_embeddings
    reach = factor * spec.rope.original_max_position_embeddings
    possible = 1 <= factor <= MOST_FACTOR and positions <= MOST_POSITIONS
    if kinds == {"yarn"} and (reach != positions or not possible):
        message = f"{positions:,}, and YaRN reaches factor x original_max_position_embeddings = {reach:,.0f}"
        yield _problem(
            "TS-TARGET-CONTEXT",
            "max_position_embeddings",
            message,
            "warning" if possible else "error",
        )


def _contradictions(text: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    heads = text.get("num_key_value_heads")
    if heads is None:
        yield _problem(
            "TS-TARGET-CONFIG",
            "num_key_value_heads",
            "is absent, and readers fill in different values",
        )
    elif heads != spec.num_attention_heads:
        message = f"{heads!r:.60}, and num_attention_heads is {spec.num_attention_heads}; MLA has as many of both"
        yield _problem("TS-TARGET-CONFIG", "num_key_value_heads", message)
    chosen = (spec.num_experts_per_tok, spec.n_routed_experts)
    counts, published = (
        map(spec.family.key, ("n_routed_experts", "num_experts_per_tok")),
        _published(spec.family),
    )
    known = dict(zip(*(published[key] for key in counts), strict=True))
    if chosen[0] > chosen[1] or known.get(chosen[1], chosen[0]) != chosen[0]:
        message = f"{chosen[0]} of {chosen[1]} experts"
        yield _problem("TS-TARGET-CONFIG", "num_experts_per_tok", message)


def _vision(config: dict[str, Any], spec: ModelSpec) -> Iterator[Problem]:
    """Keys of the vision tower that no tensor shows, and one width under two keys."""
    vision = config.get("vision_config")
    if not vision:
        return
    towers = (config.get("vision_config") for config in _configs(spec.family))
    published: dict[str, Any] = next(filter(None, towers), {})
    wanted = {key: vision.get(key) if key in SCALED else value for key, value in published.items()}
    wanted |= {"text_hidden_size": spec.hidden_size, "mm_hidden_size": vision.get("vt_hidden_size")}
    for key, value in wanted.items():
        if vision.get(key) is None or vision[key] != value:
            message = f"{vision.get(key)!r:.60}; this model needs {value!r:.60}"
            yield _problem("TS-TARGET-CONFIG", f"vision_config.{key}", message)


def _two_levels(config: dict[str, Any], text: dict[str, Any], family: Family) -> Iterator[Problem]:
    """Keys that the top level and text_config state differently; engines differ in which one they read."""
    computed = (*family.optional_keys, *family.required_keys)
    for key in sorted(config.keys() & text.keys() - {*OF_A_LEVEL, *computed}):
        if config is not text and _listed(config[key]) != _listed(text[key]):
            message = f"{config[key]!r:.60} at the top level and {text[key]!r:.60} in text_config"
            yield _problem("TS-TARGET-CONFIG", key, message)


def _listed(value: Any) -> list[Any]:
    """A list of one value says the same as the value."""
    return value if isinstance(value, list) else [value]


def quantization_blocks(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, block) of each description of the quantization: config.json's own, the text model's, ModelOpt's file."""
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
    """Words of the scheme that are not those of published Kimis, and descriptions that contradict each other."""
    problems = []
    for place, block in quantization_blocks(checkpoint):
        known = format_of_config(block)
        format = known[0] if known else format_of_method(block)
        groups = block.get("config_groups") or {}
        if format is not None and len(groups) > 1:
            message = f"{len(groups)} config_groups; which tensors each means is not read"
            problems.append(
                Problem("TS-TARGET-SCHEME", "error", f"{place}: config_groups", message)
            )
        words = load_yaml("quantization_words.yaml").get(format, ())
        formats = next((word["values"] for word in words if word["path"] == "format"), None)
        if formats and block.get("format") not in formats:
            continue  # another scheme of the same tool
        for word in words:
            for path, value in _values_at(block, word["path"].split("."), ()):
                if not any(
                    type(value) is type(known) and value == known for known in word["values"]
                ):
                    message = f"{value!r:.60} is not what published Kimis have; {word['why']}"
                    where = f"{place}: {'.'.join(path)}"
                    problems.append(Problem("TS-TARGET-SCHEME", "error", where, message))
    return problems + _disagreements(checkpoint)


def _values_at(
    value: Any, path: list[str], where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values at a path, whose `*` means every key; None where a key is absent, nothing for absent groups."""
    if not path:
        yield where, value
        return
    mapping = value if isinstance(value, dict) else {}
    for key in mapping if path[0] == "*" else (path[0],):
        yield from _values_at(mapping.get(key), path[1:], (*where, key))


def _disagreements(checkpoint: Checkpoint) -> list[Problem]:
    """config.json and hf_quant_config.json both describe the quantization; engines differ in which they read."""
    places = [place for place, _ in quantization_blocks(checkpoint)]
    if places[-1:] != [HF_QUANT_NAME]:
        return []
    if len(places) == 1:
        message = "config.json has no quantization_config; engines that read only that take the weights for BF16"
        return [
            Problem(
                "TS-TARGET-QUANT-CONFIGS", "warning", "config.json", message, "write it there too"
            )
        ]
    quant = checkpoint.hf_quant_config or {}
    ours, theirs = QuantSpec.from_configs(checkpoint.config), QuantSpec.from_configs({}, quant)
    differing = [
        name
        for name in ("format", "group_size", "kv_cache", "layers")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if set(ours.exclude) != set(theirs.exclude):
        differing.append("exclude list")
    if not differing:
        return []
    message = f"config.json and {HF_QUANT_NAME} disagree on {', '.join(differing)}"
    remedy = "make them agree; engines differ in which one they read"
    return [Problem("TS-TARGET-QUANT-CONFIGS", "error", HF_QUANT_NAME, message, remedy)]
