"""Quantization policies (which linears become NVFP4, and by which scales), and activation scales.

A policy records how a publisher quantized a release. The policies are in data/policies.yaml. If
options differ from a policy, `Conversion.deviations` lists every difference.

Activation scales are 1.0 for every linear, or calibrated: input_scale = amax / (6 * 448). NVIDIA's
data-free recipes fix amax to 2688, which gives 1.0. Kernels compute a block scale per token anyway.
So 1.0 only loses accuracy if amax / 6 of a block is outside E4M3's range. Calibrated scales fit one
model only, and their values do not show which. So `trtspec calibrate` writes the source's identity
into the file, and the file is refused for any other source.
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

# Values of options, and their descriptions for model cards.
WEIGHT_SCALES = {
    "max": "by the maximum of each block",
    "mse": "of least squared error for each block (ModelOpt's mse with fp8_scale_sweep)",
}
INPUT_SCALES = {"one": "1.0 for every linear, uncalibrated", "calibrated": "measured on text"}
KV_CACHES = {"fp8": "FP8 E4M3 by a plain cast, no scales", "none": "as the engine chooses"}
METADATA_KEY = "trtspec"  # key in the metadata of the scales' safetensors header
REMEDY = "measure the scales of this source with `trtspec calibrate`"


@dataclass(frozen=True)
class Policy:
    """Record of how a publisher quantized a release.

    Args:
        name: name of the policy.
        summary: sentence that describes the policy.
        releases: Kimi releases that are quantized by this policy unless the user chooses another.
        source: id of the published checkpoint, and its file that has the ignore list.
        quantize: roles of the linears that become NVFP4.
        exclude: templates of the published ignore list.
        weight_scales: rule for the block scales, a key of WEIGHT_SCALES.
        input_scales: activation scales, a key of INPUT_SCALES.
        kv_cache: data type of the KV cache, a key of KV_CACHES.
        exclude_vision: further templates for a model with a vision tower.
        recipe: name of ModelOpt's recipe. "" if no recipe was published.
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
        """Returns the ignore list for a model, in the format and order of the published list."""
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
            if not slot:  # the template does not depend on the layer
                patterns.add(template)
                continue
            for layer in layers_of_slot[slot]:
                patterns.add(_fill_layer(template, slot, layer, num_layers))
        return sorted(patterns)


def _fill_layer(template: str, slot: str, layer: int, num_layers: int) -> str:
    """Returns the template with the layer's number in place of `slot`.

    `num_layers`: number of layers of the model.
    """
    # `layers.1*` would also match layers 10 to 19. So a star directly after the number becomes
    # `.*`, but only for numbers that other layers begin with, as in the published lists.
    matches_others = layer > 0 and layer * 10 < num_layers
    starred = f"{slot}*"
    if matches_others and template.endswith(starred):
        return template.replace(starred, f"{layer}.*")
    return template.replace(slot, str(layer))


def load_policy(name: str) -> Policy:
    """Returns the policy `name` of data/policies.yaml."""
    return Policy(name, **load_yaml("policies.yaml")["policies"][name])


def default_policy(spec: ModelSpec, name: str) -> Policy:
    """Returns the policy of a model's release.

    Raises UsageError if no policy was published for the release.

    Args:
        spec: architecture of the model.
        name: id or name of the checkpoint. If it is a published one, its release counts.
            Otherwise the release that the config shows counts.
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
        values: scale by linear. None: 1.0 for every linear.
        digest: SHA-256 of the scales' file, or "one". It is part of the journal's header, because
            other scales give another output.
        file: name of the scales' file. "" without a file.
        description: text for the model card.
    """

    values: dict[str, float] | None = None
    digest: str = "one"
    file: str = ""
    description: str = "1.0 for every linear (uncalibrated)"

    @staticmethod
    def load(path: Path | None, checkpoint: Checkpoint) -> InputScales:
        """Reads the file of scales that `trtspec calibrate` measured on `checkpoint`.

        If `path` is None, the scales are 1.0 for every linear. Raises UsageError if the file was
        not measured on this checkpoint. Raises TrtspecError if a scale is not a positive finite
        number.
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
        source = metadata.get("source")
        texts = metadata.get("texts")
        tokens = metadata.get("tokens")
        origin = f"measured on {source} with {texts} texts, {tokens} tokens"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return InputScales(values, digest, path.name, f"{path.name}, {origin}")

    def scale(self, linears: list[str]) -> float:
        """Returns the common activation scale of linears that read the same input.

        It is the largest of their scales in the file. Raises TrtspecError if the file has a scale
        for none of them.
        """
        if self.values is None:
            return 1.0
        scales = [self.values[linear] for linear in linears if linear in self.values]
        if not scales:
            text = f"{self.file} has no input scale for {linears[0]}"
            raise TrtspecError(text, "calibrate with the same policy, or pass `input_scales` one")
        return max(scales)


def _read(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Reads a file of scales. Returns the scale by linear, and the metadata of the calibration.

    Raises UsageError if `trtspec calibrate` did not write the file.
    """
    values = {}
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = json.loads(stream.metadata()[METADATA_KEY])
            for name in stream.keys():  # noqa: SIM118  # safe_open objects are not iterable
                linear = name.removesuffix(".input_scale")
                values[linear] = stream.get_tensor(name).item()
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        raise UsageError(f"{path} was not written by `trtspec calibrate`", REMEDY) from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("fingerprint"), dict):
        raise UsageError(f"{path} does not say which source it was measured on", REMEDY)
    return values, metadata


def _refuse_other_source(path: Path, metadata: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raises UsageError if the scales were measured on another checkpoint.

    Args:
        path: file of the scales, for the message.
        metadata: metadata that the calibration wrote.
        checkpoint: the source of the conversion.
    """
    measured_on = metadata["fingerprint"]
    source: Mapping[str, Any] = identity(checkpoint)
    changed = [name for key, name in MODEL.items() if measured_on.get(key) != source[key]]
    if changed:
        other = metadata.get("source")
        text = (
            f"{path.name} was measured on another source ({other}): {' and '.join(changed)} differ"
        )
        raise UsageError(text, REMEDY)
