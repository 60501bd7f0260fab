"""Which tensors become NVFP4, by which scales, and which exclude list says so; the rules are data (data/policies.yaml).

A policy is what a publisher did. Options may differ from it; then `deviations` names every difference."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtspec.checkpoint.target_tensors import shared_partners as shared_partners
from trtspec.data_files import load_yaml
from trtspec.errors import UsageError
from trtspec.files import load_file
from trtspec.specs import ModelSpec

TEXT_PREFIX = "language_model."


WEIGHT_SCALES = {
    "max": "by the maximum of each block",
    "mse": "of least squared error for each block (ModelOpt's mse with fp8_scale_sweep)",
}
INPUT_SCALES = {"one": "1.0 for every linear, uncalibrated", "calibrated": "measured on text"}
KV_CACHES = {"fp8": "FP8 E4M3 by a plain cast, no scales", "none": "as the engine chooses"}


@dataclass(frozen=True)
class Policy:
    """`quantize` are patterns of module names; `exclude` and `exclude_vision` are templates of the published ignore
    list; `source` and `recipe` say where it was published, `config` is ModelOpt's dictionary that chooses the same
    linears, `modelopt` the releases whose bytes it gives."""

    name: str
    summary: str
    quantize: tuple[str, ...]
    exclude: tuple[str, ...]
    exclude_vision: tuple[str, ...] = ()
    source: str = ""
    recipe: str = ""
    config: str = ""
    modelopt: tuple[str, ...] = ()
    weight_scales: str = "max"
    input_scales: str = "one"
    kv_cache: str = "fp8"

    def deviations(self, weight_scales: str, input_scales: str, kv_cache: str | None) -> list[str]:
        """What these choices (keys of the tables above; None is no KV cache) do otherwise than the publisher."""
        chosen = (
            ("weight scales", WEIGHT_SCALES, self.weight_scales, weight_scales),
            ("activation scales", INPUT_SCALES, self.input_scales, input_scales),
            ("KV cache", KV_CACHES, self.kv_cache, kv_cache or "none"),
        )
        return [
            f"{what}: {table[here]}; {self.published_as} has them {table[there]}"
            for what, table, there, here in chosen
            if there != here
        ]

    @property
    def published_as(self) -> str:
        """The checkpoint or file that the policy was read from."""
        return self.source.partition(",")[0] or f"policy {self.name}"

    def quantizes(self, name: str) -> bool:
        """Whether the module or weight of this stored name becomes NVFP4."""
        module = name.removeprefix(TEXT_PREFIX).removesuffix(".weight")
        return any(fnmatchcase(module, pattern) for pattern in self.quantize)

    def exclude_patterns(self, spec: ModelSpec) -> list[str]:
        """The ignore list for this model, written and ordered as the published one."""
        dense, last = spec.first_k_dense_replace, spec.num_hidden_layers
        layers = {"{layer}": range(last), "{dense}": range(dense), "{moe}": range(dense, last)}
        entries = set(self.exclude_vision) if spec.has_vision else set()
        for template in self.exclude:
            text = template.replace("{prefix}", spec.name_prefix)
            slot = next((slot for slot in layers if slot in text), None)
            entries |= {text} if slot is None else {_numbered(text, slot, layer, last) for layer in layers[slot]}
        return sorted(entries)


def _numbered(template: str, slot: str, layer: int, last: int) -> str:
    """Fills in the layer; `layers.1*` would also match layers 10 to 19, so a star right behind it becomes `.*`."""
    ambiguous = template.endswith(f"{slot}*") and layer > 0 and layer * 10 < last
    return template.replace(slot + "*" if ambiguous else slot, f"{layer}.*" if ambiguous else str(layer))


def load_policy(name: str) -> Policy:
    """A shipped policy by name, or one from a YAML file with the keys of a shipped one."""
    shipped = load_yaml("policies.yaml")["policies"]
    if name in shipped:
        return _policy(name, shipped[name])
    if not Path(name).is_file():
        raise UsageError(
            f"policy {name!r} is neither one of {', '.join(shipped)} nor a file",
            "see `trtspec quantize --help`",
        )
    return _policy(Path(name).stem, load_file(name), name)


def _policy(name: str, entry: Any, file: str = "policies.yaml") -> Policy:
    """A row as a Policy. Raises UsageError naming the key that is missing, unknown or has a value it cannot have."""
    remedy = "give it `summary`, `quantize` and `exclude`; see `trtspec quantize --help` and data/policies.yaml"
    if not isinstance(entry, dict):
        raise UsageError(f"{file} is not a policy: it holds no mapping", remedy)
    keys = {field.name for field in fields(Policy)} - {"name"} | {"family"}
    unknown, missing = sorted(entry.keys() - keys), sorted({"summary", "quantize", "exclude"} - entry.keys())
    if unknown or missing:
        text = f"unknown key {unknown[0]}" if unknown else f"{missing[0]} is missing"
        raise UsageError(f"{file} is not a policy: {text}", remedy)
    lists = {"quantize", "exclude", "exclude_vision", "modelopt"}
    values: dict[str, Any] = {}
    for key in sorted(entry.keys() - {"family"}):
        value = entry[key]
        items = value if key in lists else [value]
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            kind = "a list of texts" if key in lists else "a text"
            raise UsageError(f"{file} is not a policy: {key} is not {kind}", remedy)
        values[key] = tuple(value) if key in lists else value
    for key, table in (("weight_scales", WEIGHT_SCALES), ("input_scales", INPUT_SCALES), ("kv_cache", KV_CACHES)):
        if values.get(key, next(iter(table))) not in table:
            raise UsageError(f"{file} is not a policy: {key} is {values[key]}", f"use one of {', '.join(table)}")
    return Policy(name, **values)


def default_policy(*names: str) -> Policy:
    """The policy of the family that one of `names` (hub id, path, config name) tells, else the table's default.

    In a path the last part that tells a family counts, so that a hub cache's `models--org--Kimi-K2.5/snapshots/...`
    is recognised.
    """
    table = load_yaml("policies.yaml")
    for name in names:
        for part in reversed(re.split(r"[/\\]", name)):
            for key, entry in table["policies"].items():
                if re.search(entry["family"], part, re.IGNORECASE):
                    return _policy(key, entry)
    return _policy(table["default"], table["policies"][table["default"]])
