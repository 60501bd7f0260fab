"""Which tensors become NVFP4, by which scales of weights and activations, and which exclude list says so.

A policy is what a publisher did, and is data (data/policies.yaml). Options may differ from it; then `deviations` names
every difference.

Activation scales are 1.0 everywhere, or read from a file of calibrated ones: input_scale = amax / (6 * 448). NVIDIA's
data-free recipes pin amax to 2688, so that it is 1.0; block scales are computed per token anyway, so 1.0 costs only
where a block's amax / 6 leaves E4M3's range. A scale fits one model only, and nothing in its value tells which:
`trtspec calibrate` writes the source's identity into the file, and it is refused for any other.
"""

from __future__ import annotations

import hashlib
import json
import math
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
    """`quantize` are roles of linears; `exclude` and `exclude_vision` are templates of the published ignore
    list; `source` and `recipe` say where it was published, `modelopt` are the releases whose bytes it gives, and
    `releases` are those of Kimi whose default it is."""

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
        """The ignore list for this model, written and ordered as the published one."""
        num_dense, num_layers = spec.first_k_dense_replace, spec.num_hidden_layers
        layers = {
            "{layer}": range(num_layers),
            "{dense}": range(num_dense),
            "{moe}": range(num_dense, num_layers),
        }
        entries = set(self.exclude_vision) if spec.has_vision else set()
        for template in self.exclude:
            text = template.replace("{prefix}", spec.family.prefix)
            slot = next((slot for slot in layers if slot in text), "")
            entries |= (
                {_fill_layer(text, slot, layer, num_layers) for layer in layers[slot]}
                if slot
                else {text}
            )
        return sorted(entries)


def _fill_layer(template: str, slot: str, layer: int, num_layers: int) -> str:
    """Fills in the layer; `layers.1*` would also match layers 10 to 19, so a star right behind it becomes `.*`."""
    ambiguous = template.endswith(f"{slot}*") and layer > 0 and layer * 10 < num_layers
    return template.replace(
        slot + "*" if ambiguous else slot, f"{layer}.*" if ambiguous else str(layer)
    )


def load_policy(name: str) -> Policy:
    """A row of data/policies.yaml."""
    return Policy(name, **load_yaml("policies.yaml")["policies"][name])


def default_policy(spec: ModelSpec, name: str) -> Policy:
    """The policy of a model's release: that of the published checkpoint `name`, else the one its config tells."""
    record = known_target(name)
    release = spec.version if record is None else record.family
    policies = map(load_policy, load_yaml("policies.yaml")["policies"])
    for policy in policies:
        if release in policy.releases:
            return policy
    raise UsageError(f"nobody has published how {release} is quantized", "choose a `policy`")


@dataclass(frozen=True)
class InputScales:
    """Activation scales by linear, `values` None for 1.0 everywhere. `digest` goes into the journal: other scales,
    another output. `description` is for the card."""

    values: dict[str, float] | None = None
    digest: str = "one"
    file: str = ""
    description: str = "1.0 for every linear (uncalibrated)"

    @staticmethod
    def load(path: Path | None, checkpoint: Checkpoint) -> InputScales:
        """Reads what `trtspec calibrate` measured on `checkpoint`; None means 1.0 everywhere.

        Raises UsageError if the file was not measured on this checkpoint, TrtspecError for a scale that is not a
        positive finite number.
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
        """The one scale of linears that read the same input: the largest that the file gives for any of them."""
        if self.values is None:
            return 1.0
        scales = [self.values[linear] for linear in linears if linear in self.values]
        if not scales:
            text = f"{self.file} has no input scale for {linears[0]}"
            raise TrtspecError(text, "calibrate with the same policy, or pass `input_scales` one")
        return max(scales)


def _read(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Scales by linear, and what calibration wrote about them. Raises UsageError if `calibrate` did not write it."""
    values = {}
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = json.loads(stream.metadata()[METADATA_KEY])
            for name in stream.keys():  # noqa: SIM118
                values[name.removesuffix(".input_scale")] = stream.get_tensor(name).item()
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError):
        raise UsageError(f"{path} was not written by `trtspec calibrate`", REMEDY) from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("fingerprint"), dict):
        raise UsageError(f"{path} does not say which source it was measured on", REMEDY)
    return values, metadata


def _refuse_other_source(path: Path, metadata: dict[str, Any], checkpoint: Checkpoint) -> None:
    measured_on, source = metadata["fingerprint"], identity(checkpoint)
    changed = [name for key, name in MODEL.items() if measured_on.get(key) != source[key]]
    if changed:
        text = f"{path.name} was measured on another source ({metadata.get('source')}): {' and '.join(changed)} differ"
        raise UsageError(text, REMEDY)
