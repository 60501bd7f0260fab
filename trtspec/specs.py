"""Frozen, torch-free records of a target model, a draft head, a quantization and a GPU.

`ModelSpec.from_config` reads a `ModelSpec` from a Hugging Face config.json. `Values` reads the
single keys and names the key of a wrong value. `trtspec.checkpoint.heads` makes a `HeadSpec`, and
prefers tensor shapes to config.json.
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
    # Every GPU of gpus.yaml becomes a choice of the command line's options.
    Gpu = Literal[tuple(gpu_names())]

MAX_INTEGER = 2**31 - 1  # largest size or token id that is accepted
REMEDY = "correct config.json, or download it again"
CODE = "TS-CONFIG-KEY"
MAX_SHOWN_CHARS = 60  # of a wrong value in an error message
FINITE_NUMBER = confloat(strict=True, ge=-1e300, le=1e300)
ID: Any = conint(strict=True, ge=-MAX_INTEGER, le=MAX_INTEGER)
# keys of JSON objects inside a config.json that hold keys of KEY_TYPES themselves
NESTED = (
    "text_config",
    "transformer_layer_config",
    "eagle_config",
    "quantization_config",
    "quantization",
)
# names of the keys that readers of a config.json rely on at any level, by the type of their values
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
    """Reader of one JSON object of a config.json that checks the type of each value.

    values: the JSON object.
    where: name of the object in error messages, such as "config.json: text_config".
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def read(self, key: str, key_type: Any, default: Any = None) -> Any:
        """Returns the value of a key, validated by pydantic as `key_type`.

        Returns the default if the value is absent or null and the default is not None. Raises
        TrtspecError, with the key and the reason, if the key is absent or the value has another
        type.
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
            message = f"{self.where}: {key} is {ascii(value)[:MAX_SHOWN_CHARS]}: {reason}"
            raise TrtspecError(message, REMEDY, CODE) from None

    def whole(
        self, key: str, default: int | None = None, least: int = 0, most: int = MAX_INTEGER
    ) -> int:
        """Returns the integer at a key, or the default if the integer is absent, null or 0.

        Raises TrtspecError if the value is not an integer from `least` to `most`.
        """
        return self.read(key, conint(strict=True, ge=least, le=most), default) or default or 0

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the finite number at a key, or the default if the number is absent, null or 0.

        Raises TrtspecError if the value is not a finite number.
        """
        return float(self.read(key, FINITE_NUMBER, default) or default or 0)

    def mapping(self, key: str) -> Values:
        """Returns a reader of the object at a key. An absent or null object is read as empty."""
        return Values(self.read(key, dict, {}), f"{self.where}: {key}")


@functools.cache
def _adapter(key_type: Any) -> TypeAdapter[Any]:
    """Returns pydantic's validator of a type. Cached, because building a validator is slow."""
    return TypeAdapter(key_type)


def check_kinds(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the config if every key of KEY_TYPES has its type, in nested objects too.

    Raises TrtspecError with the first key that has another type. `where` names the config in the
    message.
    """
    values = Values(config, where)
    for key_type, keys in KEY_TYPES.items():
        for key in keys:
            if config.get(key) is not None:
                values.read(key, key_type)
    for key in NESTED:
        if config.get(key):
            check_kinds(config[key], f"{where}: {key}")
    # compressed-tensors writes -1 as the group size of a scale for each whole row.
    groups = values.mapping("config_groups")
    for group in groups.values:
        groups.mapping(group).mapping("weights").whole("group_size", 0, least=-1)
    return config


Attention = Literal["mha", "mla"]

# sizes of ModelSpec that every config.json has as integers of at least 1
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# Far beyond any model. Loops run over both sizes, so a damaged config must not state billions.
LIMITS = {"num_hidden_layers": 2000, "n_routed_experts": 20_000}
YARN_NUMBERS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class RopeSpec:
    """Settings of a rotary position embedding, with the names that config.json has for them.

    theta: base of the rotation frequencies.
    rope_type: "default" or "yarn". "default" uses only theta.
    original_max_position_embeddings: number of positions before YaRN extends them by `factor`.
    """

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
        """Whether YaRN extends the positions."""
        return self.rope_type == "yarn"

    @staticmethod
    def from_config(config: dict[str, Any]) -> RopeSpec:
        """Reads the settings from a text config.

        `rope_parameters` (transformers 5) has priority over `rope_scaling`. Both may hold
        `rope_theta`, which is otherwise a key of the config itself. The type may be called
        `rope_type` or `type`. Raises TrtspecError if the type is neither "default" nor "yarn".
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
            # The models compute with a zero mscale. `number` replaced it by the default.
            numbers["mscale"] = 0.0
        trained_positions = scaling.whole(
            "original_max_position_embeddings", RopeSpec.original_max_position_embeddings, least=1
        )
        return RopeSpec(
            theta, "yarn", original_max_position_embeddings=trained_positions, **numbers
        )


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of a checkpoint's weights, as its configuration files state it.

    format: format of the quantized linears.
    group_size: number of values along a row that share a scale. 0 if the format has no groups.
    exclude: patterns of modules that are not quantized, in their published order.
    kv_cache: "fp8", or None if no format of the KV cache is stated.
    block_size: rows and columns that share a scale, for fp8-block only.
    layers: formats by module name, if ModelOpt mixed several. Empty for one format.
    where: "config.json", "config.json:text_config" or "hf_quant_config.json". "" for BF16.
    """

    format: WeightFormat = WeightFormat.BF16
    group_size: int = 0
    exclude: tuple[str, ...] = ()
    kv_cache: str | None = None
    block_size: tuple[int, int] | None = None
    layers: dict[str, WeightFormat] = field(default_factory=dict, hash=False)
    where: str = ""

    def __post_init__(self) -> None:
        # Callers may pass a name such as "nvfp4".
        object.__setattr__(self, "format", WeightFormat(self.format))

    @functools.cached_property
    def unquantized(self) -> re.Pattern[str]:
        """Pattern that matches the names of modules that `exclude` lists as not quantized.

        ModelOpt (NVFP4) lists shell patterns. compressed-tensors and FP8 list names, also without
        their prefix, or `re:` and a regular expression. An invalid regular expression matches
        nothing.
        """
        translate = fnmatch.translate if self.format.is_fp4 else _ignore_entry_regex
        alternatives = "|".join(map(translate, self.exclude))
        # An empty pattern would match every name.
        return re.compile(alternatives or r"(?!)")

    def format_of(self, module: str, role: str) -> WeightFormat:
        """Returns the format in which an engine expects the weight of a linear.

        `layers` decides if it lists formats. Otherwise a linear is BF16 if `exclude` matches its
        module, or if the format never quantizes its role.
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
        """Returns the quantization that a checkpoint's configs state, BF16 if they state none.

        `quantization_config` in config.json has priority over the same key in text_config, and over
        hf_quant_config.json. Raises TrtspecError if the format is not one that Kimi checkpoints
        have.
        """
        block, where = _quantization_config(config, hf_quant_config)
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
            raise TrtspecError(message, f"pass a target in {supported}", "TS-TARGET-FORMAT-UNKNOWN")
        format, group_size, block_size = known
        # Tools write the list under several keys. dict.fromkeys drops repeated patterns.
        lists = (block.get(key) or () for key in format.storage.unquantized)
        exclude = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
        kv_cache = None
        if block.get("kv_cache_scheme"):
            kv_cache = "fp8"
        layers = formats_of_layers(block)
        return QuantSpec(format, group_size, exclude, kv_cache, block_size, layers, where)


def _quantization_config(
    config: dict[str, Any], hf_quant_config: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str]:
    """Returns a checkpoint's quantization_config, and the file and level that it comes from.

    hf_quant_config.json is translated to the same keys. None or {} if no file states a format.
    """
    block = config.get("quantization_config")
    where = "config.json"
    if not block and isinstance(config.get("text_config"), dict):
        block = config["text_config"].get("quantization_config")
        where = "config.json:text_config"
    if not block and hf_quant_config:
        stated = hf_quant_config.get("quantization", {})
        # The keys that ModelOpt itself writes for the same facts into config.json.
        block = {
            **stated,
            "quant_method": "modelopt",
            "ignore": stated.get("exclude_modules", []),
        }
        if stated.get("kv_cache_quant_algo"):
            block["kv_cache_scheme"] = {"num_bits": 8}
        where = "hf_quant_config.json"
    return block, where


def _ignore_entry_regex(pattern: str) -> str:
    """Translates an entry of an ignore list (compressed-tensors or FP8) to a regular expression.

    An entry is a module's name, whole or without its prefix, or `re:` and a regular expression.
    """
    if not pattern.startswith("re:"):
        return rf"(?:.*\.)?{re.escape(pattern)}\Z"
    alternative = f"(?:{pattern[3:]})"
    try:
        re.compile(alternative)
    except (re.error, RecursionError, OverflowError):
        return r"(?!)"
    # The expressions are joined to one, in which a group's name must not occur twice.
    return r"(?!)" if "(?P" in alternative else alternative


@dataclass(frozen=True)
class ModelSpec(Sizes):
    """Record of a target: a Kimi text model (DeepSeek-V3 architecture) and what belongs to it.

    Fields without a line here have the names of keys in config.json.

    family: record of the model's family.
    architecture: class that engines load, the first of `architectures`.
    quant: quantization of the weights.
    eos_token_ids: token ids that end an answer.
    has_vision: whether config.json describes a vision tower.
    remote_code: whether the checkpoint brings Python code.
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
        """Name of the release within the family, such as k2.5, as exactly as config.json tells."""
        packed = self.quant.format.values_per_element > 1
        return self.family.version(self, self.eos_token_ids, packed)

    @property
    def qk_head_dim(self) -> int:
        """Width of an attention head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def default_aux_layers(self) -> tuple[int, ...]:
        """Indices from 0 of the layers whose outputs TensorRT-LLM and ModelOpt capture by default.

        For a model of L layers they are 1, L//2-1 and L-4. A small model has fewer.
        """
        layers = self.num_hidden_layers
        return tuple(sorted({1, max(0, layers // 2 - 1), max(0, layers - 4)}))

    @property
    def kv_elements_per_token(self) -> int:
        """Number of elements that a token takes in the latent KV cache of all layers."""
        return self.num_hidden_layers * (self.kv_lora_rank + self.qk_rope_head_dim)

    @staticmethod
    def from_config(
        config: dict[str, Any],
        hf_quant_config: dict[str, Any] | None = None,
        *,
        remote_code: bool = False,
    ) -> ModelSpec:
        """Reads a target's record from its config.json.

        Raises TrtspecError if no family has its model_type, or if a key is missing or has an
        invalid value. Also raises it if ModelOpt's list gives each layer a format and the family is
        never published so.

        Args:
            hf_quant_config: ModelOpt's file, if the checkpoint has it.
            remote_code: whether the checkpoint brings Python code.
        """
        family = family_of(config)
        top = Values(config)
        text = top
        if config.get("text_config"):
            text = top.mapping("text_config")
        sizes = {
            name: text.whole(family.key(name), least=1, most=LIMITS.get(name, MAX_INTEGER))
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
            # A key in text_config has priority, because engines read it for the text model.
            level = text if name in text.values else top
            stated = level.read(name, list[ID] | ID, [])
            ids[name] = tuple(stated) if isinstance(stated, list) else (stated,)
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
    """Record of an Eagle3 head, the same for all dialects.

    Fields without a line here have the names of keys in config.json.

    dialect: name of the project's layout in which the head is stored.
    target_hidden_size: width of a captured target state.
    head_dim: width of an attention head in MHA, qk_nope_head_dim + qk_rope_head_dim in MLA.
    draft_vocab_size: number of tokens that the head can draft.
    num_aux: number of captured target states. `fc` takes num_aux * target_hidden_size inputs.
    aux_layers: indices of the target layers whose outputs are captured. They count from 0, as in
        TensorRT-LLM and ModelOpt. None if the checkpoint does not state them, so that the target's
        default layers apply.
    fc_norm: whether each captured state has its own norm before `fc`.
    norm_output: whether the state that is fed back is normed.
    norm_before_fc: whether one norm over all captured states precedes `fc`.
    norm_before_residual: whether the residual of the layer is the normed state.
    has_lm_head, has_embed_tokens, has_d2t: whether the checkpoint holds the tensor.
    layer_prefix: prefix of the draft layer's tensor names, "layers.0." or "midlayer.".
    """

    attention: Attention
    dialect: str
    target_hidden_size: int
    intermediate_size: int
    num_key_value_heads: int
    head_dim: int
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
    layer_prefix: str = "layers.0."

    @property
    def eagle(self) -> Literal["3", "3.1"]:
        """Version of EAGLE that the head needs.

        It is "3.1" if the captured states or the state that is fed back are normed, else "3".
        """
        return "3.1" if self.fc_norm or self.norm_output else "3"

    @property
    def is_mla(self) -> bool:
        """Whether the head has latent attention."""
        return self.attention == "mla"

    @property
    def is_pruned(self) -> bool:
        """Whether the head drafts from fewer tokens than the target's vocabulary has."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kv_elements_per_token(self) -> int:
        """Number of elements that a token takes in the KV cache of the draft layer.

        MLA stores the latent state and the rope part, MHA stores K and V.
        """
        if self.is_mla:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class GpuSpec:
    """Record of a GPU from data/gpus.yaml.

    memory_bytes: memory as the device reports it.
    memory_bandwidth: bytes per second.
    gpus_per_node: number of GPUs on one board or tray.
    nvlink_gpus: number of GPUs that NVLink joins, which may be in several nodes.
    source: publication of the figures.
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
        """Whether NVLink connects GPUs of several nodes."""
        return self.nvlink_gpus > self.gpus_per_node


def gpu_spec(name: Gpu) -> GpuSpec:
    """Returns the record of a GPU by its name in data/gpus.yaml, such as b200 or gb300."""
    data = load_yaml("gpus.yaml")
    row = dict(data["gpus"][name])
    memory = row.pop("memory_mib") * 2**20
    return GpuSpec(name=name, memory_bytes=memory, source=data["source"], **row)
