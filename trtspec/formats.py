"""Storage formats of Kimi weights: the tensors of one linear, their dtypes and sizes.

Only this file knows what a format looks like. All other code asks a `WeightFormat`, which is a
string ("nvfp4" in JSON and on the command line) with properties: `format.parts`,
`format.values_per_element`, `format.part_shapes(rows, columns)`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar

from trtspec.errors import TrtspecError

PLAIN_DTYPES = ("BF16", "F16", "F32")  # safetensors codes of weights that need no scales
NVFP4_BLOCK = 16  # values along K that share one FP8 scale
E2M1_MAX = 6.0
E4M3_MAX = 448.0
NVFP4_RANGE = E2M1_MAX * E4M3_MAX  # 2688: the largest magnitude under a scale_2 of 1
# Below this largest magnitude, ModelOpt's search of block scales leaves float32's range.
TINIEST_AMAX = 2.0**-88
# rows and columns that share one scale, if config.json has no weight_block_size
FP8_BLOCK_SIZE = (128, 128)
INT4_GROUP = 32  # values along K that share one BF16 scale, if config.json has no group_size


class StoredTensor(Protocol):
    """Entry of a safetensors header.

    dtype: safetensors code such as "BF16".
    shape: number of elements in each dimension.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Tensor = TypeVar("Tensor", bound=StoredTensor)
# purpose of a stored tensor: the values, a scale for each group of values in a row, a scale for
# each block of rows and columns, one number, or the shape of the matrix
PartKind = Literal["values", "groups", "blocks", "scalar", "shape"]


@dataclass(frozen=True)
class Storage:
    """Layout of one linear [N outputs, K inputs] in a checkpoint.

    title: name for messages.
    parts: suffixes of the tensors that are needed to decode. The first holds the values.
    extra_parts: suffixes of further tensors, which are not needed to decode.
    dtypes: safetensors codes that each of `all_parts` may have, the published code first.
    kinds: purpose of each of `all_parts`.
    values_per_element: number of weights in one element of the first part.
    group: number of values along K that share a scale.
    unquantized: keys of quantization_config that list the modules without quantization.
    never: roles of linears that engines do not quantize, listed or not.
    method: value of `quant_method` in quantization_config.
    algorithm: name that ModelOpt gives the format in a list of layers.
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
        """Suffixes of all tensors of the linear, the values first."""
        return (*self.parts, *self.extra_parts)


# layout of each format, with the positional fields in the order of `Storage`
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
    """Format in which a checkpoint stores its weights.

    Engines compute NVFP4 on FP4 tensor cores and quantize the activations too (W4A4).
    """

    BF16 = "bf16"
    FP8_BLOCK = "fp8-block"
    INT4 = "int4"
    NVFP4 = "nvfp4"

    @property
    def storage(self) -> Storage:
        """Layout of a linear in this format."""
        return _STORAGE[self]

    @property
    def parts(self) -> tuple[str, ...]:
        """Suffixes of the tensors that the values are decoded from, the values first."""
        return self.storage.parts

    @property
    def values_per_element(self) -> int:
        """Number of weights in one element of the stored values."""
        return self.storage.values_per_element

    @property
    def is_plain(self) -> bool:
        """Whether the stored numbers are the weights themselves, without scales."""
        return self is WeightFormat.BF16

    @property
    def is_fp4(self) -> bool:
        """Whether engines compute the format on FP4 tensor cores.

        Such a linear has an FP8 scale for each block of 16 values and a float32 scale for the
        tensor.
        """
        return self is WeightFormat.NVFP4

    @property
    def is_grouped_integer(self) -> bool:
        """Whether weights are packed integers with a scale for each group of values in a row."""
        return self is WeightFormat.INT4

    # Cached, because the many linears of a model have only a few shapes.
    @functools.cache
    def part_shapes(
        self, rows: int, columns: int, group_size: int = 0, block: tuple[int, int] | None = None
    ) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Returns the shapes that each tensor of a [rows, columns] matrix may have, by suffix.

        Args:
            group_size: number of values along a row that share a scale. 0: as in published Kimis.
            block: rows and columns that share a scale. None: as in published Kimis.
        """
        storage = self.storage
        height, width = block or FP8_BLOCK_SIZE
        # -(-a // b) is a / b, rounded up.
        shapes: dict[PartKind, tuple[tuple[int, ...], ...]] = {
            "values": ((rows, -(-columns // storage.values_per_element)),),
            "groups": ((rows, -(-columns // (group_size or storage.group or 1))),),
            "blocks": ((-(-rows // height), -(-columns // width)),),
            "scalar": ((), (1,)),
            "shape": ((2,),),
        }
        kinds = zip(storage.all_parts, storage.kinds, strict=True)
        return {suffix: shapes[part_kind] for suffix, part_kind in kinds}

    def match_score(self, tensors: Mapping[str, StoredTensor]) -> int:
        """Number of dtypes and shapes of one linear's tensors that agree with this format.

        `tensors`: header entries by suffix, with the suffix that holds the format's values.
        """
        # A damaged checkpoint may hold values of less than two dimensions. The others count as 0.
        padded_shape = (*tensors[self.parts[0]].shape, 0, 0)
        rows = padded_shape[0]
        columns = padded_shape[1] * self.values_per_element
        shapes = self.part_shapes(rows, columns)
        score = 0
        for suffix, dtypes in zip(self.storage.all_parts, self.storage.dtypes, strict=True):
            if suffix in tensors:
                score += tensors[suffix].dtype in dtypes
                score += tensors[suffix].shape in shapes[suffix]
        return score


_parts_by_format = [format.storage.all_parts for format in WeightFormat]
# suffixes of all stored tensors, each listed once
SUFFIXES = tuple(dict.fromkeys(chain.from_iterable(_parts_by_format)))
# suffixes of the tensors beside the values: scales and shapes
SIDE_PARTS = tuple(dict.fromkeys(chain.from_iterable(parts[1:] for parts in _parts_by_format)))
VALUE_SUFFIXES = {format.parts[0] for format in WeightFormat}
# formats by the suffix and the dtype of their values
VALUES: dict[tuple[str, str], list[WeightFormat]] = {}
for _format in WeightFormat:
    for _dtype in _format.storage.dtypes[0]:
        VALUES.setdefault((_format.parts[0], _dtype), []).append(_format)


def recognised(tensors: Mapping[str, StoredTensor]) -> WeightFormat | None:
    """Returns the format of a linear as its stored tensors show it, whatever the config states.

    Suffix and dtype of the values decide. If several formats share them, the format that agrees
    with most of the other dtypes and shapes wins. None if no format has such values.

    `tensors`: header entries of the linear by suffix.
    """
    for suffix, values in tensors.items():
        formats = VALUES.get((suffix, values.dtype), ())
        if formats:
            if len(formats) == 1:
                return formats[0]
            return max(formats, key=lambda format: format.match_score(tensors))
    return None


def stored_format(tensors: Mapping[str, StoredTensor], module: str) -> WeightFormat:
    """Returns the format in which the weight of `module` is stored.

    BF16 if the module has no tensors of a quantized format.
    """
    names = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES}
    parts = {suffix: tensors[name] for suffix, name in names.items() if name in tensors}
    return recognised(parts) or WeightFormat.BF16


def stored_weight(tensors: Mapping[str, Tensor], name: str) -> tuple[WeightFormat, list[Tensor]]:
    """Returns the format of the weight `name` and the tensors that its values are decoded from.

    Raises TrtspecError if one of these tensors is missing.
    """
    stem = name.removesuffix(".weight")
    format = stored_format(tensors, stem)
    # A name without `.weight`, such as a bias, is a tensor that stores its own values.
    parts = [name]
    if name != stem:
        parts = [f"{stem}.{suffix}" for suffix in format.parts]
    for part in parts:
        if part not in tensors:
            message = f"{part} is missing, so {name} cannot be decoded"
            raise TrtspecError(message, "download the checkpoint again")
    return format, [tensors[part] for part in parts]


def format_of_method(block: dict[str, Any]) -> WeightFormat | None:
    """Returns the format that the `quant_method` of a quantization_config names.

    None if no format has this method.
    """
    method = block.get("quant_method")
    for format in WeightFormat:
        # BF16 has the method "", which an absent key must not match.
        if method and format.storage.method == method:
            return format
    return None


def format_of_config(
    block: dict[str, Any],
) -> tuple[WeightFormat, int, tuple[int, int] | None] | None:
    """Returns format, group size and block size that a quantization_config states.

    The group size is the number of values along a row that share a scale, 0 without groups. The
    block size is rows and columns that share a scale, None without blocks. Returns None if Kimi
    checkpoints are not published with such a scheme.
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
        if weights and all(
            scheme.get("num_bits") == 4 and scheme.get("type") == "int" for scheme in weights
        ):
            group_size = int(weights[0].get("group_size") or INT4_GROUP)
            return WeightFormat.INT4, group_size, None
    return None


def formats_of_layers(block: dict[str, Any]) -> dict[str, WeightFormat]:
    """Returns the format of each module that ModelOpt lists in a mixed-precision checkpoint.

    Formats are keyed by module name. {} if the checkpoint is not of mixed precision.
    """
    if block.get("quant_algo") != "MIXED_PRECISION":
        return {}
    listed = (block.get("quantized_layers") or {}).items()
    known = {format.storage.algorithm: format for format in WeightFormat}
    return {
        module: known.get(entry.get("quant_algo"), WeightFormat.BF16) for module, entry in listed
    }
