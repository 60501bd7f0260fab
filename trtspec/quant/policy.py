"""Which tensors become NVFP4, by which scales of weights and activations, and the exclude list.

A policy is what a publisher did, and is data (data/policies.yaml). Options may differ from it: then
`deviations` names every difference.

Activation scales are 1.0 everywhere, or read from a file of calibrated ones: input_scale =
amax / (6 * 448). NVIDIA's data-free recipes pin amax to 2688, so that it is 1.0. Block scales are
computed per token anyway, so 1.0 costs only where a block's amax / 6 leaves E4M3's range. A scale
fits one model only, and its value does not show which. So `trtspec calibrate` writes the source's
identity into the file, and the file is refused for any other source.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import MODEL, identity
from trtspec.checkpoint.published import known_target
from trtspec.data_files import load_yaml
from trtspec.errors import TrtspecError, UsageError
from trtspec.families.family import Role
from trtspec.specs import ModelSpec

WEIGHT_SCALES = {
    "max": "by the maximum of each block",
    "mse": "of least squared error for each block (ModelOpt's mse with fp8_scale_sweep)",
}
INPUT_SCALES = {"one": "1.0 for every linear, uncalibrated", "calibrated": "measured on text"}
KV_CACHES = {"fp8": "FP8 E4M3 by a plain cast, no scales", "none": "as the engine chooses"}
METADATA_KEY = "trtspec"  # of the safetensors header
REMEDY = "measure the scales of this source with `trtspec calibrate`"


@dataclass(frozen=True)
class Policy:
    """How a publisher quantized a release.

    Args:
        releases: releases of Kimi whose default this policy is.
        source: where the quantized checkpoint was published.
        recipe: ModelOpt's recipe, if one was published.
        quantize: roles of the linears that become NVFP4.
        exclude: templates of the published ignore list.
        exclude_vision: further templates for a model with a vision tower.
        modelopt: ModelOpt releases whose export has the same bytes.
    """

    name: str
    summary: str
    releases: list[str]
    source: str
    quantize: list[Role]
    exclude: list[str]
    weight_scales: Literal["max", "mse"]
    input_scales: Literal["one", "calibrated"]
    kv_cache: Literal["fp8", "none"] = "fp8"
    exclude_vision: list[str] = field(default_factory=list)
    recipe: str = ""
    modelopt: list[str] = field(default_factory=list)

    def exclude_patterns(self, spec: ModelSpec) -> list[str]:
        """The ignore list for this model, written and sorted as the published list."""
        num_dense = spec.first_k_dense_replace
        num_layers = spec.num_hidden_layers
        layers_of_slot = {
            "{layer}": range(num_layers),
            "{dense}": range(num_dense),
            "{moe}": range(num_dense, num_layers),
        }
        patterns = set[str]()
        if spec.has_vision:
            patterns.update(self.exclude_vision)
        for template in self.exclude:
            template = template.replace("{prefix}", spec.family.prefix)
            slot = next((slot for slot in layers_of_slot if slot in template), "")
            if not slot:
                patterns.add(template)
                continue
            for layer in layers_of_slot[slot]:
                patterns.add(_fill_layer(template, slot, layer, num_layers))
        return sorted(patterns)


def _fill_layer(template: str, slot: str, layer: int, num_layers: int) -> str:
    """The template with the layer's number in place of the slot."""
    # `layers.1*` would also match layers 10 to 19, so a star right behind the number becomes `.*`.
    matches_others = layer > 0 and layer * 10 < num_layers
    starred = f"{slot}*"
    if matches_others and template.endswith(starred):
        return template.replace(starred, f"{layer}.*")
    return template.replace(slot, str(layer))


def load_policy(name: str) -> Policy:
    """The policy of this name in data/policies.yaml."""
    return Policy(name, **load_yaml("policies.yaml")["policies"][name])


def default_policy(spec: ModelSpec, name: str) -> Policy:
    """The policy of a model's release.

    It is the release of the published checkpoint `name`, else the release that the config shows.
    Raises UsageError if no policy was published for the release.
    """
    published = known_target(name)
    release = spec.version
    if published:
        release = published.family
    for policy in map(load_policy, load_yaml("policies.yaml")["policies"]):
        if release in policy.releases:
            return policy
    raise UsageError(f"nobody has published how {release} is quantized", "choose a `policy`")


@dataclass(frozen=True)
class InputScales:
    """Activation scales of linears.

    Args:
        values: scale by linear, None for 1.0 everywhere.
        digest: part of the journal's header, because other scales give another output.
        file: name of the file that the scales were read from.
        description: for the model card.
    """

    values: dict[str, float] | None = None
    digest: str = "one"
    file: str = ""
    description: str = "1.0 for every linear (uncalibrated)"

    @staticmethod
    def load(path: Path | None, checkpoint: Checkpoint) -> InputScales:
        """Reads the scales that `trtspec calibrate` measured on `checkpoint`. None: 1.0 everywhere.

        Raises UsageError if the file was not measured on this checkpoint. Raises TrtspecError if a
        scale is not a positive finite number.
        """
        if path is None:
            return InputScales()
        if not path.is_file():
            raise UsageError(f"`input_scales` {path} is not a file", f"pass `one`, or {REMEDY}")
        values, metadata = _read(path)
        _refuse_other_source(path, metadata, checkpoint)
        for linear, scale in values.items():
            if not math.isfinite(scale) or scale <= 0:
                text = f"{path}: {linear}.input_scale is {scale}, a scale must be positive"
                raise TrtspecError(text, REMEDY)
        source, texts, tokens = (metadata.get(key) for key in ("source", "texts", "tokens"))
        origin = f"measured on {source} with {texts} texts, {tokens} tokens"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return InputScales(values, digest, path.name, f"{path.name}, {origin}")

    def scale(self, linears: list[str]) -> float:
        """The scale of linears that read the same input: the largest in the file for any of them.

        Raises TrtspecError if the file has a scale for none of them.
        """
        if self.values is None:
            return 1.0
        scales = [self.values[linear] for linear in linears if linear in self.values]
        if not scales:
            text = f"{self.file} has no input scale for {linears[0]}"
            raise TrtspecError(text, "calibrate with the same policy, or pass `input_scales` one")
        return max(scales)


def _read(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """(scale by linear, metadata that calibration wrote).

    Raises UsageError if `trtspec calibrate` did not write the file.
    """
    values = {}
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = json.loads(stream.metadata()[METADATA_KEY])
            for name in stream.keys():  # noqa: SIM118
                linear = name.removesuffix(".input_scale")
                values[linear] = stream.get_tensor(name).item()
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        raise UsageError(f"{path} was not written by `trtspec calibrate`", REMEDY) from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("fingerprint"), dict):
        raise UsageError(f"{path} does not say which source it was measured on", REMEDY)
    return values, metadata


def _refuse_other_source(path: Path, metadata: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raises UsageError if the scales were measured on a checkpoint with another identity."""
    measured_on = metadata["fingerprint"]
    source: Mapping[str, Any] = identity(checkpoint)
    changed = [name for key, name in MODEL.items() if measured_on.get(key) != source[key]]
    if changed:
        other = metadata.get("source")
        text = (
            f"{path.name} was measured on another source ({other}): {' and '.join(changed)} differ"
        )
        raise UsageError(text, REMEDY)
