"""A derived checkpoint re-read against its source: names, shapes, dtypes, scales, rounding error."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from trtspec.checkpoint.headers import Checkpoint, ShardReader, read_json, same_bytes
from trtspec.checkpoint.target_problems import ReadTarget
from trtspec.checkpoint.values import byte_faults
from trtspec.errors import Problem, has_errors
from trtspec.formats import WeightFormat, stored_format, stored_weight
from trtspec.quant.convert import choose_packer, weight_class
from trtspec.quant.native import (
    BLOCK,
    Array,
    Rows,
    Scaling,
    decoded,
    prepared,
    read_bytes,
    read_rows,
)
from trtspec.quant.plan import plain_names
from trtspec.quant.policy import WEIGHT_SCALES

SCALES = ("weight_scale", "weight_scale_2", "input_scale")
NEARLY_ALL = 0.8  # of the linears follow from the source: the others were changed
NVFP4_ERROR_LIMIT = 0.2  # random weights round with 0.095; a wrong scale or order is far above


@dataclass(frozen=True)
class RoundingError:
    """Of the tensors of one class: norm of the differences over norm of the source; `worst`: of a single tensor."""

    tensors: int
    relative_error: float
    worst: float


@dataclass(frozen=True)
class CheckpointComparison:
    """How many of `tensors` were read again (`compared`) and what they show. `repacked_alike`: those that trtspec packs
    from the source to the same bytes."""

    compared: int
    tensors: int
    classes: dict[str, RoundingError]
    zero_blocks: int
    repacked_alike: int
    problems: list[Problem] = field(repr=False)


def compare(target: ReadTarget, source: Checkpoint, sample: int = 64) -> CheckpointComparison:
    """Re-reads `target` against `source`; `sample` tensors are decoded and compared, 0 for all.

    Nothing is decoded if `target` alone has an error.
    """
    derived = target.checkpoint
    names, origin = plain_names(derived.tensors), plain_names(source.tensors)
    problems = _name_problems(names, origin) + _shape_problems(derived, source, names, origin)
    whole = not has_errors(target.problems)
    chosen = _sample(sorted(names.keys() & origin.keys()), derived, sample) if whole else []
    with ShardReader(derived.path) as new, ShardReader(source.path) as old:
        reread = _Reread(target, source, new, old)
        for name in chosen:
            reread.add(name)
    provenance = derived.path / "provenance.json"
    ours = provenance.is_file() and read_json(provenance).get("command") == "quantize"
    return CheckpointComparison(
        compared=len(chosen),
        tensors=len(names),
        classes={name: _rounding(tensors) for name, tensors in sorted(reread.errors.items())},
        zero_blocks=reread.zero_blocks,
        repacked_alike=reread.alike,
        problems=problems + reread.found(ours),
    )


def _name_problems(names: dict[str, str], origin: dict[str, str]) -> list[Problem]:
    lost, new = sorted(origin.keys() - names.keys()), sorted(names.keys() - origin.keys())
    problems = []
    if lost:
        text = f"{len(lost)} tensors of the source are missing, first {lost[0]}"
        problems.append(Problem("TS-QUANT-TENSOR-LOST", "error", lost[0], text))
    if new:
        text = f"{len(new)} tensors are not in the source, first {new[0]}"
        problems.append(Problem("TS-QUANT-TENSOR-NEW", "warning", new[0], text))
    return problems


def _shape_problems(
    derived: Checkpoint, source: Checkpoint, names: dict[str, str], origin: dict[str, str]
) -> list[Problem]:
    """Tensors stored alike must have the same shape and dtype; quantized ones the shape that their packing implies."""
    problems = []
    for name in names.keys() & origin.keys():
        new, old = derived.tensors[names[name]], source.tensors[origin[name]]
        new_shape, old_shape = (_logical_shape(point, name) for point in (derived, source))
        same_format = _format(derived, name) is _format(source, name)
        if new_shape != old_shape:
            text = f"shape is {list(new_shape)}, the source's is {list(old_shape)}"
            problems.append(Problem("TS-QUANT-SHAPE", "error", name, text))
        elif same_format and new.dtype != old.dtype:
            text = f"dtype is {new.dtype}, the source's is {old.dtype}"
            problems.append(Problem("TS-QUANT-DTYPE", "error", name, text))
    return problems


def _logical_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    stored, stem = checkpoint.tensors, name.removesuffix(".weight")
    format = stored_format(stored, stem)
    shape = stored[name if format.is_plain else f"{stem}.{format.parts[0]}"].shape
    return (*shape[:-1], shape[-1] * format.values_per_element) if shape else shape


def _format(checkpoint: Checkpoint, name: str) -> WeightFormat:
    return stored_format(checkpoint.tensors, name.removesuffix(".weight"))


def _sample(names: list[str], derived: Checkpoint, count: int) -> list[str]:
    """All, or `count` of them with quantized ones first in line; the same choice each time."""
    if count == 0 or count >= len(names):
        return names
    first = [name for name in names if _format(derived, name).is_fp4]
    rest = [name for name in names if not _format(derived, name).is_fp4]
    draw = random.Random(0)
    many = min(len(first), max(count - count // 4, count - len(rest)))
    return sorted(draw.sample(first, many) + draw.sample(rest, count - many))


class _Reread:
    """Tensors decoded from both sides, one by one, and the source packed again by each rule for block scales.

    Another exporter may choose other scales (from activations, by another search). So bytes that differ are an error
    where trtspec made the checkpoint or nearly all other linears are as the source gives them.
    """

    def __init__(
        self, target: ReadTarget, source: Checkpoint, new: ShardReader, old: ShardReader
    ) -> None:
        self.family, self.derived = target.spec.family, target.checkpoint
        self.source, self.new, self.old = source, new, old
        self.problems: list[Problem] = []
        self.errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(
            list
        )  # (error, norm) by class
        self.zero_blocks = 0
        self.packers = [choose_packer(rule) for rule in WEIGHT_SCALES]
        self.alike = 0
        self.scaled_otherwise: dict[str, float] = {}
        self.packed_otherwise: list[str] = []
        self._amax: dict[str, float] = {}

    def add(self, name: str) -> None:
        if _logical_shape(self.derived, name) != _logical_shape(self.source, name):
            return
        if _format(self.derived, name).is_fp4:
            self._add_packed(name)
        elif not self._same_bytes(name):
            text = "is stored unquantized but its bytes are not the source's"
            self.problems.append(Problem("TS-QUANT-CHANGED", "error", name, text))

    def _same_bytes(self, name: str) -> bool:
        info = self.derived.tensors[name]
        if _format(self.source, name).is_plain:
            return same_bytes(self.derived, info, self.source, self.source.tensors[name])
        values = decoded(self._rows(name), self.packers[0]).values
        return np.array_equal(values.reshape(-1).view(np.uint8), read_bytes(self.new, info))

    def _rows(self, name: str) -> Rows:
        """A linear of the source, as packers take it."""
        format, parts = stored_weight(self.source.tensors, name)
        rows = read_rows(partial(read_bytes, self.old), format, parts)
        other = format.is_plain and rows.dtype != "BF16"
        return (decoded if other else prepared)(rows, self.packers[0])

    def _add_packed(self, name: str) -> None:
        stem, tensors = name.removesuffix(".weight"), self.derived.tensors
        for suffix in SCALES:
            info = tensors[f"{stem}.{suffix}"]
            if any(byte_faults([info], read_bytes(self.new, info)[None])):
                text = "holds NaN, infinity, zero or a negative number"
                self.problems.append(Problem("TS-QUANT-BAD-SCALE", "error", info.name, text))
        rows = self._rows(name)
        columns = rows.shape[1]
        packed = read_bytes(self.new, tensors[name]).reshape(-1, columns // 2)
        scale = read_bytes(self.new, tensors[f"{name}_scale"]).reshape(-1, columns // BLOCK)
        scale_2 = float(read_bytes(self.new, tensors[f"{name}_scale_2"]).view("<f4")[0])
        self.zero_blocks += int(((packed.reshape(-1, BLOCK // 2) & 0x77) == 0).all(-1).sum())
        amax = self._amax[name] = self.packers[0].amax(rows)
        squares = self.packers[0].errors(rows, Scaling(amax, scale_2), packed, scale)
        error, norm = map(math.sqrt, squares)
        self.errors[weight_class(name)].append((error, norm))
        relative = error / norm if norm else error
        if not relative <= NVFP4_ERROR_LIMIT:
            text = f"differs from the source by {relative:.3f} of its norm; rounding alone gives about 0.1"
            self.problems.append(Problem("TS-QUANT-ERROR", "error", name, text))
        if math.isfinite(amax):
            self._pack_again(name, rows, packed, scale, scale_2)

    def _pack_again(
        self, name: str, rows: Rows, packed: Array, scale: Array, scale_2: float
    ) -> None:
        scaling = Scaling.of(max(self._amax[name], *self._partners_amax(name), 0.0))
        if scale_2 != scaling.scale_2:
            self.scaled_otherwise[name] = scale_2 / scaling.scale_2
            return
        packed_again, scale_again = np.empty_like(packed), np.empty_like(scale)
        for packer in self.packers:
            packer.pack(rows, scaling, packed_again, scale_again)
            if np.array_equal(packed_again, packed) and np.array_equal(scale_again, scale):
                self.alike += 1
                return
        self.packed_otherwise.append(name)

    def _partners_amax(self, name: str) -> Iterator[float]:
        """max|w| of the linears that share its scale."""
        for module in self.family.partners(name.removesuffix(".weight")):
            partner = f"{module}.weight"
            if partner in self.derived.tensors and _format(self.derived, partner).is_fp4:
                if partner not in self._amax:
                    self._amax[partner] = self.packers[0].amax(self._rows(partner))
                yield self._amax[partner]

    def found(self, ours: bool) -> list[Problem]:
        """The problems of all tensors that were added; `ours`: `trtspec quantize` made it, so each byte follows."""
        found = list(self.problems)
        scaled_alike = self.alike + len(self.packed_otherwise)
        if ours or scaled_alike >= NEARLY_ALL * (scaled_alike + len(self.scaled_otherwise)):
            for name, ratio in self.scaled_otherwise.items():
                text = f"is {ratio:.6g} times what the largest weight of the source gives"
                where = f"{name.removesuffix('.weight')}.weight_scale_2"
                found.append(Problem("TS-QUANT-SCALE-2", "error", where, text))
        if ours or self.alike >= NEARLY_ALL * scaled_alike:
            text = "its bytes or block scales are not those that packing the source gives"
            found += [
                Problem("TS-QUANT-BYTES", "error", name, text) for name in self.packed_otherwise
            ]
        return found


def _rounding(tensors: list[tuple[float, float]]) -> RoundingError:
    """Of (error, norm) of each tensor."""
    error, norm = (math.hypot(*column) for column in zip(*tensors, strict=True))
    worst = max(one / size if size else one for one, size in tensors)
    return RoundingError(len(tensors), error / norm if norm else 0.0, worst)
