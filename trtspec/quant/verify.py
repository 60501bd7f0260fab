"""Comparison of an NVFP4 checkpoint with its source: names, shapes, dtypes, scales and bytes."""

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
from trtspec.quant.content import MAX_ROUNDING_ERROR
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
# Fraction of linears with the scale or the bytes that packing the source gives. If so many agree,
# the exporter computes like trtspec, and the other linears were changed.
NEARLY_ALL = 0.8


@dataclass(frozen=True)
class CheckpointComparison:
    """Result of the comparison of a derived checkpoint with its source.

    Args:
        compared: number of tensors that were decoded and compared.
        tensors: number of all tensors.
        classes: rounding error by class of linear.
        zero_blocks: number of NVFP4 blocks that are entirely zero, in the compared tensors.
        repacked_alike: number of linears for which packing the source gives the same bytes.
        problems: differences that are errors or warnings.
    """

    compared: int
    tensors: int
    classes: dict[str, RoundingError]
    zero_blocks: int
    repacked_alike: int
    problems: list[Problem] = field(repr=False)


@dataclass(frozen=True)
class RoundingError:
    """Rounding error of one class of linears.

    tensors: number of linears.
    relative_error: norm of the differences over norm of the source, of all linears together.
    worst: largest relative error of a single linear.
    """

    tensors: int
    relative_error: float
    worst: float


def compare(target: ReadTarget, source: Checkpoint, sample: int = 64) -> CheckpointComparison:
    """Compares a derived checkpoint with its source.

    Args:
        target: the derived checkpoint. If it has errors by itself, no tensor is decoded.
        source: the source.
        sample: number of tensors to decode and compare. 0: all tensors.
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
    """Returns problems of tensors that only one of the checkpoints has.

    `names` and `source_names`: stored tensor name by plain weight name.
    """
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
    """Returns problems of tensors whose decoded shape or dtype differs from the source.

    The dtype may differ if the storage format differs.

    Args:
        derived: the derived checkpoint.
        source: the source.
        names: stored tensor name by plain weight name, in the derived checkpoint.
        source_names: stored tensor name by plain weight name, in the source.
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
    """Shape of the decoded weight with the plain name `name`."""
    format = _format(checkpoint, name)
    stored_name = name
    if not format.is_plain:
        stored_name = f"{name.removesuffix('.weight')}.{format.parts[0]}"
    shape = checkpoint.tensors[stored_name].shape
    if not shape:
        return shape
    return (*shape[:-1], shape[-1] * format.values_per_element)


def _format(checkpoint: Checkpoint, name: str) -> WeightFormat:
    """Storage format of the weight with the plain name `name`."""
    return stored_format(checkpoint.tensors, name.removesuffix(".weight"))


def _sample(names: list[str], derived: Checkpoint, count: int) -> list[str]:
    """Returns a sample of `count` plain names, sorted. The same arguments give the same sample.

    If possible, at least three quarters are names of NVFP4 weights. A `count` of 0 returns all
    names.
    """
    if count == 0 or count >= len(names):
        return names
    quantized = [name for name in names if _format(derived, name).is_fp4]
    others = [name for name in names if not _format(derived, name).is_fp4]
    three_quarters = count - count // 4
    # More are needed if there are too few other tensors.
    wanted = max(three_quarters, count - len(others))
    num_quantized = min(len(quantized), wanted)
    draw = random.Random(0)
    chosen = draw.sample(quantized, num_quantized)
    return sorted(chosen + draw.sample(others, count - num_quantized))


class _Reread:
    """Comparison of single tensors of a derived checkpoint with its source.

    Linears of the source are packed again, by each rule for block scales. Another exporter may
    choose other scales, from activations or by another search. So differing bytes are an error only
    if trtspec wrote the checkpoint, or if nearly all linears have the expected bytes.
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
        # Norm of the difference and norm of the source of each linear, by class of linear.
        self.errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.zero_blocks = 0
        self.repacked_alike = 0
        # Ratio of the stored weight_scale_2 to the expected one, by name of the linear.
        self.scaled_otherwise: dict[str, float] = {}
        self.packed_otherwise: list[str] = []
        self._amax: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Compares one tensor, and records problems and errors. `name`: plain name."""
        # A differing shape is reported already, and the bytes cannot be compared.
        if _decoded_shape(self.derived, name) != _decoded_shape(self.source, name):
            return
        if _format(self.derived, name).is_fp4:
            self._add_quantized(name)
        elif not self._has_source_bytes(name):
            text = "is stored unquantized but its bytes are not the source's"
            self.problems.append(Problem("TS-QUANT-CHANGED", "error", name, text))

    def all_problems(self, by_trtspec: bool) -> list[Problem]:
        """Returns the problems of all compared tensors.

        `by_trtspec`: whether `trtspec quantize` wrote the checkpoint. All bytes must then equal the
        bytes that packing the source gives.
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
        """Whether an unquantized tensor has the bytes of the source, or of the decoded source."""
        info = self.derived.tensors[name]
        if _format(self.source, name).is_plain:
            return same_bytes(self.derived, info, self.source, self.source.tensors[name])
        values = decoded_rows(self._source_rows(name), self.packers[0]).values
        stored = read_bytes(self.derived_reader, info)
        return np.array_equal(values.reshape(-1).view(np.uint8), stored)

    def _source_rows(self, name: str) -> Rows:
        """Returns the rows of a linear of the source, in a form that all packers can pack."""
        format, parts = stored_weight(self.source.tensors, name)
        rows = read_rows(partial(read_bytes, self.source_reader), format, parts)
        # The packer in C takes plain rows only in BF16.
        is_other_float = format.is_plain and rows.dtype != "BF16"
        convert = decoded_rows if is_other_float else packable_rows
        return convert(rows, self.packers[0])

    def _add_quantized(self, name: str) -> None:
        """Compares an NVFP4 linear with its source: valid scales, rounding error and bytes."""
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
        # Written with `not`, so that NaN is above the limit too.
        if not relative <= MAX_ROUNDING_ERROR:
            text = (
                f"differs from the source by {relative:.3f} of its norm; "
                "rounding alone gives about 0.1"
            )
            self.problems.append(Problem("TS-QUANT-ERROR", "error", name, text))
        if math.isfinite(amax):
            self._repack(name, rows, packed, scale, scale_2)

    def _repack(self, name: str, rows: Rows, packed: Array, scale: Array, scale_2: float) -> None:
        """Packs the source by each rule, and records whether a rule gives the stored bytes.

        Args:
            name: plain name of the linear.
            rows: rows of the source.
            packed: stored codes, uint8 [N, K/2].
            scale: stored block scales, uint8 [N, K/16].
            scale_2: stored scale of the tensor.
        """
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
        """Returns max|w| of each other linear that shares the scale of the linear `name`."""
        maxima = []
        for module in self.family.partners(name.removesuffix(".weight")):
            partner = f"{module}.weight"
            if partner in self.derived.tensors and _format(self.derived, partner).is_fp4:
                if partner not in self._amax:
                    self._amax[partner] = self.packers[0].amax(self._source_rows(partner))
                maxima.append(self._amax[partner])
        return maxima


def _rounding(tensors: list[tuple[float, float]]) -> RoundingError:
    """Returns the rounding error of a class of linears.

    `tensors`: norm of the difference and norm of the source, of each linear.
    """
    errors, norms = zip(*tensors, strict=True)
    norm = math.hypot(*norms)
    relative_error = math.hypot(*errors) / norm if norm else 0.0
    worst = max(error / size if size else error for error, size in tensors)
    return RoundingError(len(tensors), relative_error, worst)
