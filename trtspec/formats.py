"""The storage formats of Kimi weights: the tensors of one linear, their dtypes and sizes.

This file alone spells a format, and all other code asks it. A format is a string ("nvfp4" in JSON
and on the command line) with its properties: `format.parts`, `format.values_per_element`,
`format.part_shapes(rows, columns)`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar

from trtspec.errors import TrtspecError

PLAIN_DTYPES = ("BF16", "F16", "F32")  # safetensors codes of weights that need nothing beside them
NVFP4_BLOCK = 16  # values along K that share one FP8 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
NVFP4_RANGE = E2M1_MAX * E4M3_MAX  # 2688: the largest magnitude under a scale_2 of 1
# a smaller amax leaves float32's range in ModelOpt's search of block scales
TINIEST_AMAX = 2.0**-88
# rows and columns that share one scale, if config.json has no weight_block_size
FP8_BLOCK_SIZE = (128, 128)
INT4_GROUP = 32  # values along K that share one BF16 scale, if config.json has no group_size


class StoredTensor(Protocol):
    """An entry of a safetensors header."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Tensor = TypeVar("Tensor", bound=StoredTensor)
PartKind = Literal["values", "groups", "blocks", "scalar", "shape"]


@dataclass(frozen=True)
class Storage:
    """How a checkpoint stores one linear [N, K].

    parts, extra_parts: suffixes of the module's name. The first part holds the values.
    dtypes: the safetensors codes that each of `all_parts` may have, the published code first.
    kinds: the purpose of each part: the values, a scale for each group of a row or block of rows
        and columns, one number, or the shape.
    values_per_element: weights in one element of the first part.
    group: values along K that share a scale.
    unquantized: the keys that list the modules without quantization.
    never: the roles of linears that engines do not quantize, listed or not.
    method: the `quant_method` of its quantization_config.
    algorithm: ModelOpt's name for it in a list of layers.
    """

    title: str
    parts: tuple[str, ...]
    dtypes: tuple[tuple[str, ...], ...]
    kinds: tuple[PartKind, ...] = ("values",)
    values_per_element: int = 1
    group: int = 0
    extra_parts: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ("ignore",)
    never: tuple[str, ...] = ("router", "embedding")
    method: str = ""
    algorithm: str = ""

    @property
    def all_parts(self) -> tuple[str, ...]:
        return (*self.parts, *self.extra_parts)


_STORAGE = {
    "bf16": Storage("BF16", ("weight",), (PLAIN_DTYPES,)),
    "fp8-block": Storage(
        "FP8 in 128x128 blocks", ("weight", "weight_scale_inv"),
        (("F8_E4M3",), ("F32", "BF16", "F16")),
        kinds=("values", "blocks"), method="fp8", algorithm="FP8_PB_WO",
        unquantized=("modules_to_not_convert", "ignored_layers", "ignore"),
        never=("router", "embedding", "lm_head"),
    ),
    "int4": Storage(
        "INT4 pack-quantized", ("weight_packed", "weight_scale", "weight_shape"),
        (("I32",), PLAIN_DTYPES, ("I64", "I32")), ("values", "groups", "shape"), 8, INT4_GROUP,
        method="compressed-tensors",
    ),
    "nvfp4": Storage(
        "NVFP4", ("weight", "weight_scale", "weight_scale_2"),
        (("U8",), ("F8_E4M3",), ("F32",), ("F32",)),
        ("values", "groups", "scalar", "scalar"), 2, NVFP4_BLOCK,
        extra_parts=("input_scale",), method="modelopt", algorithm="NVFP4",
        unquantized=("ignore", "exclude_modules"),
    ),
}  # fmt: skip
KV_ELEMENT_BYTES = {"fp8": 1, "bf16": 2}  # bytes of an element of the KV cache, by dtype


class WeightFormat(StrEnum):
    """How a checkpoint stores its weights.

    NVFP4 needs FP4 tensor cores and quantizes activations too (W4A4).
    """

    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"
    INT4 = "int4"
    NVFP4 = "nvfp4"

    @property
    def storage(self) -> Storage:
        return _STORAGE[self]

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of the tensors that the values are decoded from, the values first."""
        return self.storage.parts

    @property
    def values_per_element(self) -> int:
        return self.storage.values_per_element

    @property
    def is_plain(self) -> bool:
        """Whether the stored numbers are the values, with nothing to decode."""
        return self is WeightFormat.BF16

    @property
    def is_fp4(self) -> bool:
        """Whether FP4 tensor cores compute it.

        It has an FP8 scale per block of 16 and a float32 scale per tensor.
        """
        return self is WeightFormat.NVFP4

    @property
    def is_grouped_integer(self) -> bool:
        """Whether it is packed integers with a scale per row and group along K."""
        return self is WeightFormat.INT4

    @functools.cache  # the linears of a model have a few shapes
    def part_shapes(
        self, rows: int, columns: int, group_size: int = 0, block: tuple[int, int] | None = None
    ) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The shapes that each part of a [rows, columns] matrix may have, by suffix.

        `group_size` 0 and `block` None: the sizes of published Kimis.
        """
        storage = self.storage
        height, width = block or FP8_BLOCK_SIZE
        shapes: dict[PartKind, tuple[tuple[int, ...], ...]] = {
            "values": ((rows, -(-columns // storage.values_per_element)),),
            "groups": ((rows, -(-columns // (group_size or storage.group or 1))),),
            "blocks": ((-(-rows // height), -(-columns // width)),),
            "scalar": ((), (1,)),
            "shape": ((2,),),
        }
        kinds = zip(storage.all_parts, storage.kinds, strict=True)
        return {suffix: shapes[part_kind] for suffix, part_kind in kinds}

    def fits(self, parts: Mapping[str, StoredTensor]) -> int:
        """Number of dtypes and shapes of the stored tensors that this format has."""
        rows, elements = (*parts[self.parts[0]].shape, 0, 0)[:2]
        shapes = self.part_shapes(rows, elements * self.values_per_element)
        return sum(
            (parts[suffix].dtype in dtypes) + (parts[suffix].shape in shapes[suffix])
            for suffix, dtypes in zip(self.storage.all_parts, self.storage.dtypes, strict=True)
            if suffix in parts
        )


SIDE_PARTS = tuple(
    dict.fromkeys(suffix for format in WeightFormat for suffix in format.storage.all_parts[1:])
)
SUFFIXES = tuple({suffix: None for format in WeightFormat for suffix in format.storage.all_parts})
VALUE_SUFFIXES = {format.parts[0] for format in WeightFormat}
# the formats whose values have this suffix and dtype
VALUES: dict[tuple[str, str], list[WeightFormat]] = {}
for _format in WeightFormat:
    for _dtype in _format.storage.dtypes[0]:
        VALUES.setdefault((_format.parts[0], _dtype), []).append(_format)


def recognised(parts: Mapping[str, StoredTensor]) -> WeightFormat | None:
    """The format of a weight by the tensors below its module, not by the config.

    Suffix and dtype of the values decide. If several formats have these, the other tensors and all
    shapes decide. None if no format has them.
    """
    for suffix, values in parts.items():
        formats = VALUES.get((suffix, values.dtype), ())
        if formats:
            if len(formats) == 1:
                return formats[0]
            return max(formats, key=lambda format: format.fits(parts))
    return None


def stored_format(tensors: Mapping[str, StoredTensor], module: str) -> WeightFormat:
    """The format of the weight of `module`. A tensor without a format is plain."""
    names = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES}
    parts = {suffix: tensors[name] for suffix, name in names.items() if name in tensors}
    return recognised(parts) or WeightFormat.BF16


def stored_weight(tensors: Mapping[str, Tensor], name: str) -> tuple[WeightFormat, list[Tensor]]:
    """The format of the weight `name`, and the tensors from which its values are decoded.

    Raises TrtspecError if a tensor is missing.
    """
    stem = name.removesuffix(".weight")
    format = stored_format(tensors, stem)
    parts = [name]
    if name != stem:
        parts = [f"{stem}.{suffix}" for suffix in format.parts]
    for part in parts:
        if part not in tensors:
            message = f"{part} is missing, so {name} cannot be decoded"
            raise TrtspecError(message, "download the checkpoint again")
    return format, [tensors[part] for part in parts]


def format_of_method(block: dict[str, Any]) -> WeightFormat | None:
    """The format of a quantization_config by its method alone. None if no format has it."""
    method = block.get("quant_method")
    return next(
        (format for format in WeightFormat if method and format.storage.method == method), None
    )


def format_of_config(
    block: dict[str, Any],
) -> tuple[WeightFormat, int, tuple[int, int] | None] | None:
    """Format, group size and block size of a quantization_config.

    None if no Kimi is published in it.
    """
    method = block.get("quant_method", "")
    if method == "modelopt" and (block.get("quant_algo") == "NVFP4" or formats_of_layers(block)):
        return WeightFormat.NVFP4, NVFP4_BLOCK, None
    sizes = block.get("weight_block_size")
    if method == "fp8" and isinstance(sizes, list) and len(sizes) == 2 and min(sizes) > 0:
        return WeightFormat.FP8_BLOCK, 0, (int(sizes[0]), int(sizes[1]))
    if method == "compressed-tensors" and block.get("format") == "pack-quantized":
        groups = block.get("config_groups") or {}
        weights = [(group.get("weights") or {}) for group in groups.values()]
        if weights and all(w.get("num_bits") == 4 and w.get("type") == "int" for w in weights):
            group_size = int(weights[0].get("group_size") or INT4_GROUP)
            return WeightFormat.INT4, group_size, None
    return None


def formats_of_layers(block: dict[str, Any]) -> dict[str, WeightFormat]:
    """The format of each module that ModelOpt lists for a checkpoint of several formats.

    {} for any other checkpoint.
    """
    if block.get("quant_algo") != "MIXED_PRECISION":
        return {}
    listed = (block.get("quantized_layers") or {}).items()
    known = {format.storage.algorithm: format for format in WeightFormat}
    return {
        module: known.get(entry.get("quant_algo"), WeightFormat.BF16) for module, entry in listed
    }
