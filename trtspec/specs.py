"""Frozen, torch-free records of a target model, a draft head, a quantization and a GPU.

The typed values of a config.json, from which they are read, are here too. The error for a value of
another type names its key. `ModelSpec.from_config` reads a `ModelSpec` from a Hugging Face
`config.json`. `trtspec.checkpoint.heads` makes a `HeadSpec`, and prefers tensor shapes to
config.json.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError, confloat, conint

from trtspec.data_files import gpu_names, load_yaml
from trtspec.errors import TrtspecError
from trtspec.families.family import Family, LatentSizes, Sizes
from trtspec.families.known import family_of
from trtspec.formats import WeightFormat, format_of_config, formats_of_layers

if TYPE_CHECKING:
    Gpu = str
else:
    Gpu = Literal[tuple(gpu_names())]  # a row in gpus.yaml is a choice of every option

MOST = 2**31 - 1  # largest size
REMEDY = "correct config.json, or download it again"
CODE = "TS-CONFIG-KEY"
SHOWN = 60  # characters of a wrong value
NUMBER = confloat(strict=True, ge=-1e300, le=1e300)
ID: Any = conint(strict=True, ge=-MOST, le=MOST)
NESTED = (
    "text_config",
    "transformer_layer_config",
    "eagle_config",
    "quantization_config",
    "quantization",
)
# the type of each key that readers of a config.json rely on, at any level
KEY_TYPES: dict[Any, tuple[str, ...]] = {
    dict: (*NESTED, "vision_config", "speculators_config", "rope_scaling", "rope_parameters"),
    dict[str, dict[str, Any]]: ("config_groups", "quantized_layers"),
    str: (
        "model_type", "speculators_model_type", "quant_method", "quant_algo", "kv_cache_quant_algo",
        "format",
    ),
    list[str]: (
        "architectures", "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers",
    ),
    list[ID]: ("eagle_aux_hidden_state_layer_ids", "weight_block_size"),
    list[ID] | ID: ("eos_token_id",),
}  # fmt: skip


class Values:
    """One mapping of a config.json, read key by key. `where` names it in messages."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def read(self, key: str, key_type: Any, default: Any = None) -> Any:
        """The value of a key as pydantic's `key_type`.

        Absent and null give the default, if there is one. Raises TrtspecError with the key and the
        fault of its value.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if key not in self.values:
            raise TrtspecError(f"{self.where} has no key {key!r}", REMEDY, CODE)
        try:
            return _adapter(key_type).validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            message = f"{self.where}: {key} is {ascii(value)[:SHOWN]}: {reason}"
            raise TrtspecError(message, REMEDY, CODE) from None

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = MOST) -> int:
        """An integer within its limits. 0 gives the default too."""
        return self.read(key, conint(strict=True, ge=least, le=most), default) or default or 0

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. 0 gives the default too."""
        return float(self.read(key, NUMBER, default) or default or 0)

    def mapping(self, key: str) -> Values:
        """The mapping at a key, empty if the key is absent or null."""
        return Values(self.read(key, dict, {}), f"{self.where}: {key}")


@functools.cache
def _adapter(key_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(key_type)


def check_kinds(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the config.json if every key of KEY_TYPES has its type.

    Raises TrtspecError with the first key of another type.
    """
    values = Values(config, where)
    for key_type, keys in KEY_TYPES.items():
        for key in keys:
            if config.get(key) is not None:
                values.read(key, key_type)
    for key in NESTED:
        if config.get(key):
            check_kinds(config[key], f"{where}: {key}")
    groups = values.mapping("config_groups")
    for group in groups.values:
        groups.mapping(group).mapping("weights").whole("group_size", 0, least=-1)
    return config


Attention = Literal["mha", "mla"]

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# far beyond any model: loops run over both
LIMITS = {"num_hidden_layers": 2000, "n_routed_experts": 20_000}
YARN_NUMBERS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding. `rope_type` is "default" or "yarn". "default" uses no yarn field."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def is_yarn(self) -> bool:
        return self.rope_type == "yarn"

    @staticmethod
    def from_config(config: dict[str, Any]) -> RopeSpec:
        """Reads `rope_parameters` (transformers 5), else `rope_scaling` and `rope_theta`.

        Both spellings of the type are read.
        """
        values = Values(config)
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        scaling = values.mapping(key)
        holder = scaling if "rope_theta" in scaling.values else values
        theta = holder.number("rope_theta", RopeSpec.theta)
        rope_type = scaling.read("rope_type", str, "") or scaling.read("type", str, "") or "default"
        if rope_type == "default":
            return RopeSpec(theta=theta)
        if rope_type != "yarn":
            message = (
                f"rope type {rope_type!r} is not one that Kimi models or Eagle3 heads use "
                "(default, yarn)"
            )
            remedy = "check rope_scaling / rope_parameters in config.json"
            raise TrtspecError(message, remedy, "TS-CONFIG-ROPE")
        numbers = {name: scaling.number(name, getattr(RopeSpec, name)) for name in YARN_NUMBERS}
        if scaling.values.get("mscale") == 0:
            # The models read 0 so. For other numbers 0 means the default.
            numbers["mscale"] = 0.0
        length = scaling.whole(
            "original_max_position_embeddings", RopeSpec.original_max_position_embeddings, least=1
        )
        return RopeSpec(theta, "yarn", original_max_position_embeddings=length, **numbers)


@dataclass(frozen=True)
class QuantSpec:
    """How a checkpoint stores its weights. `exclude`: the patterns as published, in their order."""

    format: WeightFormat = WeightFormat.BF16
    group_size: int = 0
    exclude: tuple[str, ...] = ()
    kv_cache: str | None = None  # "fp8" or None
    block_size: tuple[int, int] | None = None  # fp8-block only
    layers: dict[str, WeightFormat] = field(default_factory=dict, hash=False)  # of several formats
    # "config.json", "config.json:text_config" or "hf_quant_config.json"; "" for bf16
    where: str = ""

    def __post_init__(self) -> None:
        # Callers may pass a name such as "nvfp4".
        object.__setattr__(self, "format", WeightFormat(self.format))

    @functools.cached_property
    def unquantized(self) -> re.Pattern[str]:
        """Matches the modules that `exclude` leaves alone, as the format's own library reads it.

        ModelOpt reads shell patterns. compressed-tensors reads names, also without their prefix, or
        `re:` and a regular expression. An invalid regular expression matches nothing.
        """
        translate = fnmatch.translate if self.format.is_fp4 else _named_or_regex
        return re.compile("|".join(map(translate, self.exclude)) or r"(?!)")

    def format_of(self, module: str, role: str) -> WeightFormat:
        """The format of a linear as an engine decides it.

        The list of layers decides. Without one, the exclude list does.
        """
        if self.layers:
            return self.layers.get(module, WeightFormat.BF16)
        excluded = self.unquantized.match(module)
        plain = excluded or role in self.format.storage.never
        return WeightFormat.BF16 if plain else self.format

    @staticmethod
    def from_configs(
        config: dict[str, Any], hf_quant_config: dict[str, Any] | None = None
    ) -> QuantSpec:
        """Detects the format from `quantization_config` and hf_quant_config.json.

        `quantization_config` may be at the top level or inside text_config.
        """
        where = "config.json"
        block = config.get("quantization_config")
        if not block and isinstance(config.get("text_config"), dict):
            block = config["text_config"].get("quantization_config")
            where = "config.json:text_config"
        if not block and hf_quant_config:
            stated = hf_quant_config.get("quantization", {})
            block = {
                **stated,
                "quant_method": "modelopt",
                "ignore": stated.get("exclude_modules", []),
            }
            if stated.get("kv_cache_quant_algo"):
                block["kv_cache_scheme"] = {"num_bits": 8}
            where = "hf_quant_config.json"
        if not block:
            return QuantSpec()
        known = format_of_config(block)
        if known is None:
            keys = ("quant_method", "format", "quant_algo")
            shown = ", ".join(f"{key} {block.get(key)!r}" for key in keys)
            message = (
                f"quantization_config in {where} ({shown}) is not a format that Kimi checkpoints "
                "are published in"
            )
            supported = ", ".join(format.storage.title for format in WeightFormat)
            raise TrtspecError(message, f"supported: {supported}", "TS-TARGET-FORMAT-UNKNOWN")
        format, group_size, block_size = known
        lists = (block.get(key) or () for key in format.storage.unquantized)
        exclude = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
        kv_cache = None
        if block.get("kv_cache_scheme"):
            kv_cache = "fp8"
        layers = formats_of_layers(block)
        return QuantSpec(format, group_size, exclude, kv_cache, block_size, layers, where)


def _named_or_regex(pattern: str) -> str:
    """Translates an entry of an ignore list to an alternative of a regular expression.

    The list is of compressed-tensors or FP8.
    """
    if not pattern.startswith("re:"):
        return rf"(?:.*\.)?{re.escape(pattern)}\Z"
    alternative = f"(?:{pattern[3:]})"
    try:
        re.compile(alternative)
    except (re.error, RecursionError, OverflowError):
        return r"(?!)"
    return r"(?!)" if "(?P" in alternative else alternative


@dataclass(frozen=True)
class ModelSpec(Sizes):
    """A Kimi text model (DeepSeek-V3 shape) and its surroundings.

    Fields have the names of config.json.
    """

    family: Family
    model_type: str
    architecture: str
    num_experts_per_tok: int
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    quant: QuantSpec
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    has_vision: bool = False
    remote_code: bool = False

    @property
    def version(self) -> str:
        """The release within the family, as precisely as a config shows it."""
        return self.family.version(
            self, self.eos_token_ids, self.quant.format.values_per_element > 1
        )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def default_aux_layers(self) -> tuple[int, ...]:
        """Layer outputs that TensorRT-LLM and ModelOpt capture by default: 1, L//2-1, L-4.

        They count from 0.
        """
        last = self.num_hidden_layers
        return tuple(sorted({1, max(0, last // 2 - 1), max(0, last - 4)}))

    @property
    def kv_elements_per_token(self) -> int:
        """Latent KV cache elements per token, all layers: L * (kv_lora_rank + qk_rope_head_dim)."""
        return self.num_hidden_layers * (self.kv_lora_rank + self.qk_rope_head_dim)

    @staticmethod
    def from_config(
        config: dict[str, Any],
        hf_quant_config: dict[str, Any] | None = None,
        *,
        remote_code: bool = False,
    ) -> ModelSpec:
        """Parses a target's config.json. `remote_code`: whether the checkpoint brings code.

        Raises TrtspecError if no family has its model type, or if a key is missing.
        """
        family = family_of(config)
        top = Values(config)
        text = top
        if config.get("text_config"):
            text = top.mapping("text_config")
        sizes = {
            name: text.whole(family.key(name), least=1, most=LIMITS.get(name, MOST))
            for name in SIZES
        }
        quant = QuantSpec.from_configs(config, hf_quant_config)
        if quant.layers and not family.mixed:
            message = (
                f"{quant.where} lists a format for each layer, and no {family.name} is published so"
            )
            raise TrtspecError(message, "quantize its source again", "TS-TARGET-FORMAT-UNKNOWN")
        ids = {}
        for name in TOKEN_IDS:
            level = text if name in text.values else top
            integers = level.read(name, list[ID] | ID, [])
            ids[name] = tuple(integers) if isinstance(integers, list) else (integers,)
        architectures = top.read("architectures", list[str], [])
        return ModelSpec(
            family=family,
            model_type=config["model_type"],
            architecture=(architectures or ["DeepseekV3ForCausalLM"])[0],
            **sizes,
            n_shared_experts=text.whole(
                family.key("n_shared_experts"), most=LIMITS["n_routed_experts"]
            ),
            first_k_dense_replace=text.whole("first_k_dense_replace"),
            routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
            rms_norm_eps=text.number("rms_norm_eps"),
            rope=RopeSpec.from_config(text.values),
            quant=quant,
            bos_token_id=next(iter(ids["bos_token_id"]), None),
            eos_token_ids=ids["eos_token_id"],
            pad_token_id=next(iter(ids["pad_token_id"]), None),
            has_vision="vision_config" in config,
            remote_code=remote_code,
        )


@dataclass(frozen=True)
class HeadSpec(LatentSizes):
    """The canonical record of an Eagle3 head in any dialect.

    `aux_layers` counts layer *outputs* from 0 (TensorRT-LLM's and ModelOpt's convention). None: the
    checkpoint does not state them, so the target's default triple applies. Width of `fc`: num_aux *
    target_hidden_size.
    """

    attention: Attention
    dialect: str
    target_hidden_size: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int  # MHA: size of a head; MLA: qk_nope + qk_rope
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    num_aux: int = 3
    aux_layers: tuple[int, ...] | None = None
    max_position_embeddings: int = 4096
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    has_lm_head: bool = True
    has_embed_tokens: bool = False
    has_d2t: bool = False
    layer_prefix: str = "layers.0."  # or "midlayer."

    @property
    def eagle(self) -> Literal["3", "3.1"]:
        """The version of EAGLE: 3.1 norms the captured states or the state that is fed back."""
        return "3.1" if self.fc_norm or self.norm_output else "3"

    @property
    def is_mla(self) -> bool:
        return self.attention == "mla"

    @property
    def is_pruned(self) -> bool:
        """Whether the head drafts from a part of the vocabulary."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kv_elements_per_token(self) -> int:
        """KV cache elements per token of the one draft layer: latent for MLA, K and V for MHA."""
        if self.is_mla:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class GpuSpec:
    """One row of data/gpus.yaml.

    Memory is as the device reports it, bandwidth in bytes/s. A node is one board or tray. NVLink
    joins `nvlink_gpus` GPUs, which may be in several nodes.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    compute_capability: str
    gpus_per_node: int
    nvlink_gpus: int
    source: str

    @property
    def nvlink_joins_nodes(self) -> bool:
        return self.nvlink_gpus > self.gpus_per_node


def gpu_spec(name: Gpu) -> GpuSpec:
    """The row of gpus.yaml called `name` (b200, gb300, ..)."""
    data = load_yaml("gpus.yaml")
    row = dict(data["gpus"][name])
    memory = row.pop("memory_mib") * 2**20
    return GpuSpec(name=name, memory_bytes=memory, source=data["source"], **row)
