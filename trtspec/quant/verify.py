"""A derived checkpoint re-read against its source: names, shapes, dtypes, scales, errors."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from trtspec.checkpoint.headers import Checkpoint, ShardReader, read_json, same_bytes
from trtspec.checkpoint.target_problems import ReadTarget
from trtspec.checkpoint.values import byte_faults
from trtspec.errors import Problem, has_errors
from trtspec.formats import WeightFormat, stored_format, stored_weight
from trtspec.quant.conversion_plan import plain_names
from trtspec.quant.native import (
    BLOCK,
    Array,
    Rows,
    Scaling,
    decoded_rows,
    packable_rows,
    read_bytes,
    read_rows,
)
from trtspec.quant.policy import WEIGHT_SCALES
from trtspec.quant.shards import choose_packer, weight_class

SCALES = ("weight_scale", "weight_scale_2", "input_scale")
NEARLY_ALL = 0.8  # of the linears follow from the source: then the others were changed
NVFP4_ERROR_LIMIT = 0.2  # random weights round with 0.095; a wrong scale or order is far above


@dataclass(frozen=True)
class CheckpointComparison:
    """The result of re-reading a derived checkpoint against its source.

    Args:
        compared: tensors that were decoded and compared.
        tensors: all tensors.
        classes: rounding error by class of linear.
        repacked_alike: linears that trtspec packs from the source to the same bytes.
    """

    compared: int
    tensors: int
    classes: dict[str, RoundingError]
    zero_blocks: int
    repacked_alike: int
    problems: list[Problem] = field(repr=False)


@dataclass(frozen=True)
class RoundingError:
    """Norm of the differences over norm of the source, of one class of linears.

    `worst`: the same ratio of a single tensor.
    """

    tensors: int
    relative_error: float
    worst: float


def compare(target: ReadTarget, source: Checkpoint, sample: int = 64) -> CheckpointComparison:
    """Re-reads `target` against `source`. `sample`: tensors to decode and compare, 0 for all.

    Nothing is decoded if `target` alone has an error.
    """
    derived = target.checkpoint
    names = plain_names(derived.tensors)
    source_names = plain_names(source.tensors)
    problems = _name_problems(names, source_names)
    problems += _shape_problems(derived, source, names, source_names)
    chosen = list[str]()
    if not has_errors(target.problems):
        chosen = _sample(sorted(names.keys() & source_names.keys()), derived, sample)
    with ShardReader(derived.path) as derived_reader, ShardReader(source.path) as source_reader:
        reread = _Reread(target, source, derived_reader, source_reader)
        for name in chosen:
            reread.add(name)
    provenance = derived.path / "provenance.json"
    by_trtspec = provenance.is_file() and read_json(provenance).get("command") == "quantize"
    return CheckpointComparison(
        compared=len(chosen),
        tensors=len(names),
        classes={name: _rounding(tensors) for name, tensors in sorted(reread.errors.items())},
        zero_blocks=reread.zero_blocks,
        repacked_alike=reread.repacked_alike,
        problems=problems + reread.all_problems(by_trtspec),
    )


def _name_problems(names: dict[str, str], source_names: dict[str, str]) -> list[Problem]:
    """Problems of tensors that only one of the checkpoints has."""
    lost = sorted(source_names.keys() - names.keys())
    new = sorted(names.keys() - source_names.keys())
    problems = []
    if lost:
        text = f"{len(lost)} tensors of the source are missing, first {lost[0]}"
        problems.append(Problem("TS-QUANT-TENSOR-LOST", "error", lost[0], text))
    if new:
        text = f"{len(new)} tensors are not in the source, first {new[0]}"
        problems.append(Problem("TS-QUANT-TENSOR-NEW", "warning", new[0], text))
    return problems


def _shape_problems(
    derived: Checkpoint, source: Checkpoint, names: dict[str, str], source_names: dict[str, str]
) -> list[Problem]:
    """Problems of tensors whose decoded shape is not the source's, or whose dtype changed.

    A tensor may have another dtype if its format is another. `names`: stored name by plain name.
    """
    problems = []
    for name in names.keys() & source_names.keys():
        shape = _decoded_shape(derived, name)
        source_shape = _decoded_shape(source, name)
        dtype = derived.tensors[names[name]].dtype
        source_dtype = source.tensors[source_names[name]].dtype
        same_format = _format(derived, name) is _format(source, name)
        if shape != source_shape:
            text = f"shape is {list(shape)}, the source's is {list(source_shape)}"
            problems.append(Problem("TS-QUANT-SHAPE", "error", name, text))
        elif same_format and dtype != source_dtype:
            text = f"dtype is {dtype}, the source's is {source_dtype}"
            problems.append(Problem("TS-QUANT-DTYPE", "error", name, text))
    return problems


def _decoded_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    format = _format(checkpoint, name)
    stored_name = name
    if not format.is_plain:
        stored_name = f"{name.removesuffix('.weight')}.{format.parts[0]}"
    shape = checkpoint.tensors[stored_name].shape
    if not shape:
        return shape
    return (*shape[:-1], shape[-1] * format.values_per_element)


def _format(checkpoint: Checkpoint, name: str) -> WeightFormat:
    return stored_format(checkpoint.tensors, name.removesuffix(".weight"))


def _sample(names: list[str], derived: Checkpoint, count: int) -> list[str]:
    """`count` of the names, the same choice each time. 0: all of them.

    Three quarters or more are quantized tensors, if there are as many.
    """
    if count == 0 or count >= len(names):
        return names
    quantized = [name for name in names if _format(derived, name).is_fp4]
    others = [name for name in names if not _format(derived, name).is_fp4]
    wanted = max(count - count // 4, count - len(others))
    num_quantized = min(len(quantized), wanted)
    draw = random.Random(0)
    chosen = draw.sample(quantized, num_quantized)
    return sorted(chosen + draw.sample(others, count - num_quantized))


class _Reread:
    """Decodes tensors of both checkpoints, and packs the source by each rule for block scales.

    Another exporter may choose other scales (from activations, by another search). So bytes that
    differ are an error only if trtspec made the checkpoint, or if nearly all other linears are as
    the source gives them.
    """

    def __init__(
        self,
        target: ReadTarget,
        source: Checkpoint,
        derived_reader: ShardReader,
        source_reader: ShardReader,
    ) -> None:
        self.family = target.spec.family
        self.derived = target.checkpoint
        self.source = source
        self.derived_reader = derived_reader
        self.source_reader = source_reader
        self.packers = [choose_packer(rule) for rule in WEIGHT_SCALES]
        self.problems: list[Problem] = []
        # (norm of the difference, norm of the source) of each tensor, by class
        self.errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.zero_blocks = 0
        self.repacked_alike = 0
        # weight_scale_2 over the one that the source gives
        self.scaled_otherwise: dict[str, float] = {}
        self.packed_otherwise: list[str] = []
        self._amax: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Compares one tensor, unless its shape is another, which is a problem already."""
        if _decoded_shape(self.derived, name) != _decoded_shape(self.source, name):
            return
        if _format(self.derived, name).is_fp4:
            self._add_quantized(name)
        elif not self._has_source_bytes(name):
            text = "is stored unquantized but its bytes are not the source's"
            self.problems.append(Problem("TS-QUANT-CHANGED", "error", name, text))

    def all_problems(self, by_trtspec: bool) -> list[Problem]:
        """The problems of all tensors that were added.

        `by_trtspec`: `trtspec quantize` made the checkpoint, so each byte follows from the source.
        """
        problems = list(self.problems)
        scaled_alike = self.repacked_alike + len(self.packed_otherwise)
        linears = scaled_alike + len(self.scaled_otherwise)
        if by_trtspec or scaled_alike >= NEARLY_ALL * linears:
            for name, ratio in self.scaled_otherwise.items():
                text = f"is {ratio:.6g} times what the largest weight of the source gives"
                where = f"{name.removesuffix('.weight')}.weight_scale_2"
                problems.append(Problem("TS-QUANT-SCALE-2", "error", where, text))
        if by_trtspec or self.repacked_alike >= NEARLY_ALL * scaled_alike:
            text = "its bytes or block scales are not those that packing the source gives"
            for name in self.packed_otherwise:
                problems.append(Problem("TS-QUANT-BYTES", "error", name, text))
        return problems

    def _has_source_bytes(self, name: str) -> bool:
        """Whether an unquantized tensor has the source's bytes, or its decoded values' bytes."""
        info = self.derived.tensors[name]
        if _format(self.source, name).is_plain:
            return same_bytes(self.derived, info, self.source, self.source.tensors[name])
        values = decoded_rows(self._source_rows(name), self.packers[0]).values
        stored = read_bytes(self.derived_reader, info)
        return np.array_equal(values.reshape(-1).view(np.uint8), stored)

    def _source_rows(self, name: str) -> Rows:
        """A linear of the source as packers take it."""
        format, parts = stored_weight(self.source.tensors, name)
        rows = read_rows(partial(read_bytes, self.source_reader), format, parts)
        is_other_float = format.is_plain and rows.dtype != "BF16"
        convert = decoded_rows if is_other_float else packable_rows
        return convert(rows, self.packers[0])

    def _add_quantized(self, name: str) -> None:
        """Compares a linear with its source: valid scales, rounding error, and bytes."""
        tensors = self.derived.tensors
        for suffix in SCALES:
            info = tensors[f"{name.removesuffix('.weight')}.{suffix}"]
            if any(byte_faults([info], read_bytes(self.derived_reader, info)[None])):
                text = "holds NaN, infinity, zero or a negative number"
                self.problems.append(Problem("TS-QUANT-BAD-SCALE", "error", info.name, text))
        rows = self._source_rows(name)
        columns = rows.shape[1]
        packed = read_bytes(self.derived_reader, tensors[name])
        packed = packed.reshape(-1, columns // 2)
        scale = read_bytes(self.derived_reader, tensors[f"{name}_scale"])
        scale = scale.reshape(-1, columns // BLOCK)
        scale_2_bytes = read_bytes(self.derived_reader, tensors[f"{name}_scale_2"])
        scale_2 = float(scale_2_bytes.view("<f4")[0])
        # 0x77 masks the signs of both codes of a byte.
        magnitudes = packed.reshape(-1, BLOCK // 2) & 0x77
        self.zero_blocks += int((magnitudes == 0).all(-1).sum())
        amax = self.packers[0].amax(rows)
        self._amax[name] = amax
        squares = self.packers[0].errors(rows, Scaling(amax, scale_2), packed, scale)
        error, norm = map(math.sqrt, squares)
        self.errors[weight_class(name)].append((error, norm))
        relative = error / norm if norm else error
        # A NaN is not within the limit either.
        if not relative <= NVFP4_ERROR_LIMIT:
            text = (
                f"differs from the source by {relative:.3f} of its norm; "
                "rounding alone gives about 0.1"
            )
            self.problems.append(Problem("TS-QUANT-ERROR", "error", name, text))
        if math.isfinite(amax):
            self._repack(name, rows, packed, scale, scale_2)

    def _repack(self, name: str, rows: Rows, packed: Array, scale: Array, scale_2: float) -> None:
        """Packs the source by each rule, and records whether one gives the stored bytes."""
        scaling = Scaling.of(max(self._amax[name], *self._partner_maxima(name), 0.0))
        if scale_2 != scaling.scale_2:
            self.scaled_otherwise[name] = scale_2 / scaling.scale_2
            return
        repacked = np.empty_like(packed)
        repacked_scale = np.empty_like(scale)
        for packer in self.packers:
            packer.pack(rows, scaling, repacked, repacked_scale)
            if np.array_equal(repacked, packed) and np.array_equal(repacked_scale, scale):
                self.repacked_alike += 1
                return
        self.packed_otherwise.append(name)

    def _partner_maxima(self, name: str) -> list[float]:
        """max|w| of each linear that shares the scale of `name`."""
        maxima = []
        for module in self.family.partners(name.removesuffix(".weight")):
            partner = f"{module}.weight"
            if partner in self.derived.tensors and _format(self.derived, partner).is_fp4:
                if partner not in self._amax:
                    self._amax[partner] = self.packers[0].amax(self._source_rows(partner))
                maxima.append(self._amax[partner])
        return maxima


def _rounding(tensors: list[tuple[float, float]]) -> RoundingError:
    """Sums up (norm of the difference, norm of the source) of each tensor of a class."""
    errors, norms = zip(*tensors, strict=True)
    norm = math.hypot(*norms)
    relative_error = math.hypot(*errors) / norm if norm else 0.0
    worst = max(error / size if size else error for error, size in tensors)
    return RoundingError(len(tensors), relative_error, worst)
