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
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import MODEL, identity
from trtspec.data_files import load_yaml
from trtspec.errors import TrtspecError, UsageError
from trtspec.files import first_fault, load_file
from trtspec.specs import ModelSpec

TEXT_PREFIX = "language_model."
WEIGHT_SCALES = {
    "max": "by the maximum of each block",
    "mse": "of least squared error for each block (ModelOpt's mse with fp8_scale_sweep)",
}
INPUT_SCALES = {"one": "1.0 for every linear, uncalibrated", "calibrated": "measured on text"}
KV_CACHES = {"fp8": "FP8 E4M3 by a plain cast, no scales", "none": "as the engine chooses"}
METADATA_KEY = "trtspec"  # of the safetensors header
REMEDY = "calibrate SRC itself with `trtspec calibrate`, or pass `accept_input_scales` if they belong to it"


@dataclass(frozen=True)
class Policy:
    """`quantize` are patterns of module names; `exclude` and `exclude_vision` are templates of the published ignore
    list; `source` and `recipe` say where it was published, `config` is ModelOpt's dictionary that chooses the same
    linears, `modelopt` the releases whose bytes it gives, `family` matches the names of its models."""

    name: str
    summary: str
    quantize: tuple[str, ...]
    exclude: tuple[str, ...]
    exclude_vision: tuple[str, ...] = ()
    source: str = ""
    recipe: str = ""
    config: str = ""
    modelopt: tuple[str, ...] = ()
    family: str = ""
    weight_scales: Literal["max", "mse"] = "max"
    input_scales: Literal["one", "calibrated"] = "one"
    kv_cache: Literal["fp8", "none"] = "fp8"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def quantizes(self, name: str) -> bool:
        """Whether the module or weight of this stored name becomes NVFP4."""
        module = name.removeprefix(TEXT_PREFIX).removesuffix(".weight")
        return any(fnmatchcase(module, pattern) for pattern in self.quantize)

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
            text = template.replace("{prefix}", spec.name_prefix)
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
    """A shipped policy by its name or by the recipe or config that ModelOpt has for it, or one from a YAML file."""
    shipped = load_yaml("policies.yaml")["policies"]
    for key, entry in shipped.items():
        if name == key or name.removesuffix(".yaml") in (entry.get("recipe"), entry.get("config")):
            return _policy(key, entry)
    if not Path(name).is_file():
        text = f"policy {name!r} is neither one of {', '.join(shipped)} nor a file"
        raise UsageError(text, "see `trtspec quantize --help`")
    return _policy(Path(name).stem, load_file(name), name)


def _policy(name: str, entry: Any, file: str = "policies.yaml") -> Policy:
    """A row as a Policy. Raises UsageError naming the key that is missing, unknown or has a value it cannot have."""
    remedy = "give it `summary`, `quantize` and `exclude`; see `trtspec quantize --help` and data/policies.yaml"
    if not isinstance(entry, dict):
        raise UsageError(f"{file} is not a policy: it holds no mapping", remedy)
    try:
        return TypeAdapter(Policy).validate_python(entry | {"name": name})
    except ValidationError as error:
        raise UsageError(f"{file} is not a policy: {first_fault(error)}", remedy) from None


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


@dataclass(frozen=True)
class InputScales:
    """Activation scales by module, `values` None for 1.0 everywhere. `digest` goes into the journal: other scales,
    another output. `description` is for the card: where they come from, whether they belong to the source."""

    values: dict[str, float] | None = None
    digest: str = "one"
    file: str = ""
    description: str = "1.0 for every linear (uncalibrated)"

    @staticmethod
    def load(
        path: Path | None, checkpoint: Checkpoint, modules: Iterable[str], accept: bool
    ) -> InputScales:
        """The scales in a file for `checkpoint`, whose linears are `modules`; None means 1.0 everywhere.

        A file is safetensors with `<module>.input_scale`, as in a ModelOpt export; `experts.*` in place of an expert's
        number means all experts of the layer. Raises UsageError or TrtspecError naming an entry that is not a single
        positive finite number or whose linear is not there. With `accept` the file may name another source or none.
        """
        if path is None:
            return InputScales()
        if not path.is_file():
            raise UsageError(
                f"`input_scales` {path} is not a file",
                "pass `one` or the file that calibration wrote",
            )
        raw, about = _read(path)
        values: dict[str, float] = {}
        for module, scale in raw.items():
            if not math.isfinite(scale) or scale <= 0:
                text = f"{path}: {module}.input_scale is {scale}, a scale must be positive"
                raise TrtspecError(text, "calibrate again")
            plain = module.removeprefix(TEXT_PREFIX)
            if values.setdefault(plain, scale) != scale:
                raise TrtspecError(
                    f"{path} has two scales for {plain}", "keep one of them, or calibrate again"
                )
        if not values:
            raise UsageError(
                f"{path} holds no *.input_scale", "pass the file that calibration wrote"
            )
        known = {module.removeprefix(TEXT_PREFIX) for module in modules}
        if foreign := sorted(values.keys() - known - set(map(_all_experts, known))):
            more = f" and {len(foreign) - 1:,} more" if len(foreign) > 1 else ""
            text = f"{path.name} has a scale for {foreign[0]}{more}, which {checkpoint.path} does not have"
            raise UsageError(
                text, "it is another model's: calibrate this one with `trtspec calibrate`"
            )
        why = _unbound(about, checkpoint)
        if why and not accept:
            raise UsageError(f"{path.name} {why}", REMEDY)
        named, texts, tokens = (about.get(key) for key in ("source", "texts", "tokens"))
        origin = (
            f", measured on {named} with {texts:,} texts, {tokens:,} tokens"
            if named and texts and tokens
            else ""
        )
        accepted = " (not bound to this source, accepted with `accept_input_scales`)" if why else ""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return InputScales(values, digest, path.name, f"{path.name}{origin}{accepted}")

    def scale(self, modules: list[str]) -> float:
        """The one scale of linears that read the same input: the largest that the file gives for any of them."""
        if self.values is None:
            return 1.0
        plain = [module.removeprefix(TEXT_PREFIX) for module in modules]
        found = [self.values.get(module, self.values.get(_all_experts(module))) for module in plain]
        if not any(found):
            text = f"{self.file} has no input scale for {modules[0]}"
            raise TrtspecError(text, "calibrate with the same policy, or pass `input_scales` one")
        return max(filter(None, found))


def _all_experts(module: str) -> str:
    """The name under which a file has one scale for all experts of a layer."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", module)


def _unbound(about: dict[str, Any], checkpoint: Checkpoint) -> str:
    """Why scales are not known to belong to `checkpoint`, by what their file says about itself; "" where they do."""
    bound: dict[str, Any] | None = about.get("fingerprint")
    if bound is None:
        return "does not say which source it was measured on"
    found = identity(checkpoint)
    other = [name for key, name in MODEL.items() if bound.get(key) != found[key]]
    named = about.get("source", "another one")
    return (
        f"was measured on another source ({named}): {' and '.join(other)} differ" if other else ""
    )


def _read(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Scales by module, and what the file says about itself."""
    try:
        with safe_open(path, framework="pt") as stream:
            about = json.loads((stream.metadata() or {}).get(METADATA_KEY, "{}"))
            values = {}
            for name in stream.keys():  # noqa: SIM118
                module, _, suffix = name.rpartition(".")
                if suffix == "input_scale":
                    tensor = stream.get_tensor(name)
                    if tensor.numel() != 1:
                        raise ValueError(
                            f"{name} has shape {list(tensor.shape)}, one number is wanted"
                        )
                    values[module] = float(tensor)
            if not isinstance(about, dict) or not isinstance(about.get("fingerprint", {}), dict):
                raise ValueError("its header says nothing readable about its source")
            return values, about
    except (ValueError, TypeError, SafetensorError) as error:
        text = f"{path} is not a file of input scales: {error}"
        raise UsageError(
            text, "pass the safetensors file that calibration wrote, or a ModelOpt export"
        ) from None
