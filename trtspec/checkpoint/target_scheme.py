"""What quantization_config and hf_quant_config.json say about a Kimi target, against what its tensors are.

An engine believes the config: a scheme that is read in another way than it was written, or an exclude list that does
not fit the tensors, gives noise without a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtspec.checkpoint.headers import HF_QUANT_NAME, Checkpoint
from trtspec.checkpoint.target_tensors import grouped
from trtspec.errors import Problem
from trtspec.formats import SchemeWord, WeightFormat, format_of_method
from trtspec.specs import ModelSpec, QuantSpec

QUANTIZE_AGAIN = "quantize again, or correct the exclude list of quantization_config"
OTHER_SCHEME = "use a checkpoint in a published scheme (see the support matrix), or its BF16 source"


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
        yield HF_QUANT_NAME, {"quant_method": WeightFormat.NVFP4.method, **quant}


def scheme_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Words of the scheme that are not those of published Kimis, and descriptions that contradict each other."""
    problems = []
    for place, block in quantization_blocks(checkpoint):
        format = format_of_method(block)
        if format is None:
            continue
        if len(block.get("config_groups") or {}) > 1:
            message = f"{len(block['config_groups'])} config_groups; which tensors each means is not read"
            problems.append(Problem("TS-TARGET-GROUPS", "error", f"{place}: config_groups", message, OTHER_SCHEME))
        for word in format.storage.words:
            problems += _word_problems(block, word, place)
    return problems + _disagreements(checkpoint)


def _word_problems(block: dict[str, Any], word: SchemeWord, place: str) -> list[Problem]:
    problems = []
    for where, value in _values_at(block, word.path.split("."), ()):
        if not any(type(value) is type(known) and value == known for known in word.values):
            message = f"{value!r:.60} is not what published Kimis have; {word.why}"
            problems.append(Problem(word.code, "error", f"{place}: {'.'.join(where)}", message, OTHER_SCHEME))
    return problems


def _values_at(value: Any, path: list[str], where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values at a path, whose `*` means every key; None where a key is absent, nothing for groups that are not."""
    if not path:
        yield where, value
        return
    mapping = value if isinstance(value, dict) else {}
    for key in mapping if path[0] == "*" else (path[0],):
        yield from _values_at(mapping.get(key), path[1:], (*where, key))


def _disagreements(checkpoint: Checkpoint) -> list[Problem]:
    """config.json and hf_quant_config.json both describe the quantization; engines differ in which they read."""
    blocks = list(quantization_blocks(checkpoint))
    if not blocks or blocks[-1][0] != HF_QUANT_NAME:
        return []
    if len(blocks) == 1:
        message = "config.json has no quantization_config; engines that read only that take the weights for BF16"
        return [Problem("TS-TARGET-QUANT-CONFIGS", "warning", "config.json", message, "write it there too")]
    ours = QuantSpec.from_configs(checkpoint.config)
    theirs = QuantSpec.from_configs({}, checkpoint.hf_quant_config)
    fields = ("format", "group_size", "kv_cache")
    differing = [field for field in fields if getattr(ours, field) != getattr(theirs, field)]
    if set(ours.exclude) != set(theirs.exclude):
        differing.append("exclude list")
    producers = [checkpoint.config.get("quantization_config", {}).get("producer")]
    producers.append((checkpoint.hf_quant_config or {}).get("producer"))
    if None not in producers and producers[0] != producers[1]:
        differing.append("producer")
    if not differing:
        return []
    message = f"config.json and {HF_QUANT_NAME} disagree on {', '.join(differing)}"
    remedy = "make them agree; engines differ in which one they read"
    return [Problem("TS-TARGET-QUANT-CONFIGS", "error", HF_QUANT_NAME, message, remedy)]


def coverage_problems(checkpoint: Checkpoint, spec: ModelSpec, formats: dict[str, WeightFormat]) -> list[Problem]:
    """The config's format and exclude list against `formats`, those that the linears are stored in."""
    told, problems = spec.quant.format, []
    others = [f"{module} is {format}" for module, format in formats.items() if format not in (told, WeightFormat.BF16)]
    if others:
        what = f"weights are stored in another format than config.json tells ({told})"
        problems.append(grouped("TS-TARGET-FORMAT", others, what, "take config.json and weights from one checkpoint"))
    if told.is_plain:
        return problems
    packed = [module for module, format in formats.items() if not format.is_plain]
    never = [module for module in packed if module.endswith(told.storage.never)]
    if never:
        what = "router or embedding weights are quantized, which engines read as BF16"
        problems.append(grouped("TS-TARGET-ROUTER", never, what, QUANTIZE_AGAIN))
    if told not in formats.values():
        message = f"config.json tells {told} and no weight is stored so"
        where = spec.quant.where or "config.json"
        problems.append(Problem("TS-TARGET-FORMAT", "error", where, message, "remove quantization_config"))
        return problems
    return problems + _excluded(told, _patterns(checkpoint, told), formats)


def _patterns(checkpoint: Checkpoint, format: WeightFormat) -> tuple[str, ...]:
    """The modules that the block in force leaves alone, by whatever key of the format."""
    block = next(iter(quantization_blocks(checkpoint)), ("", {}))[1]
    lists = [entries for key in format.storage.unquantized if isinstance(entries := block.get(key), list)]
    return tuple(entry for entries in lists for entry in entries if isinstance(entry, str))


def _excluded(told: WeightFormat, patterns: tuple[str, ...], formats: dict[str, WeightFormat]) -> list[Problem]:
    """An engine decides by the list which weights to unpack."""
    left_alone = told.unquantized_modules(patterns)
    packed, plain = [], []
    for module, format in formats.items():
        excluded = left_alone.match(module) is not None
        if excluded and format is told:
            packed.append(module)
        if not excluded and format.is_plain and not module.endswith(told.storage.never):
            plain.append(module)
    problems = []
    if packed:
        what = f"weights are {told} and listed as not quantized"
        problems.append(grouped("TS-TARGET-EXCLUDE", packed, what, QUANTIZE_AGAIN))
    if plain:
        what = f"weights are not {told} and not listed as left alone"
        problems.append(grouped("TS-TARGET-EXCLUDE", plain, what, QUANTIZE_AGAIN))
    return problems
