"""A derived checkpoint re-read against its source: names, shapes, dtypes, scales, rounding error."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trtspec.checkpoint.headers import Checkpoint, read_json
from trtspec.checkpoint.target_problems import read_target
from trtspec.checkpoint.tensors import LazyTensors
from trtspec.errors import Problem, has_errors
from trtspec.formats import WeightFormat, shared_partners, stored_format
from trtspec.quant import nvfp4
from trtspec.quant.convert import choose_packer, weight_class
from trtspec.quant.decode import decoded, rows_of
from trtspec.quant.native import Scaling
from trtspec.quant.plan import plain_names
from trtspec.quant.policy import WEIGHT_SCALES

AGAIN = "convert the source again with `trtspec quantize`"
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
NEARLY_ALL = 0.8  # of the linears follow from the source: the others were changed
GIVE_UP = 8  # linears that no rule gives, and none that one does: another exporter's
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


def compare(out: Path, src: Path, sample: int = 64) -> CheckpointComparison:
    """Re-reads `out` against `src`; `sample` tensors are decoded and compared, 0 for all.

    Nothing is decoded where `inspect` finds an error in `out` alone.
    """
    derived, source = Checkpoint.open(out), Checkpoint.open(src)
    names, origin = plain_names(derived.tensors), plain_names(source.tensors)
    problems = _name_problems(names, origin) + _shape_problems(derived, source, names, origin)
    whole = not has_errors(read_target(derived).problems)  # inspect names them
    chosen = _sample(sorted(names.keys() & origin.keys()), derived, sample) if whole else []
    with LazyTensors(derived) as new, LazyTensors(source) as old:
        reread = _Reread(new, old)
        for name in chosen:
            reread.add(name)
    provenance = out / "provenance.json"
    ours = provenance.is_file() and read_json(provenance).get("command") == "quantize"
    return CheckpointComparison(
        compared=len(chosen),
        tensors=len(names),
        classes={name: _rounding(tensors) for name, tensors in sorted(reread.errors.items())},
        zero_blocks=reread.zero_blocks,
        repacked_alike=sum(reread.alike.values()),
        problems=problems + reread.found(ours),
    )


def _name_problems(names: dict[str, str], origin: dict[str, str]) -> list[Problem]:
    lost, new = sorted(origin.keys() - names.keys()), sorted(names.keys() - origin.keys())
    problems = []
    if lost:
        text = f"{len(lost)} tensors of the source are missing, first {lost[0]}"
        problems.append(Problem("TS-QUANT-TENSOR-LOST", "error", lost[0], text, AGAIN))
    if new:
        text = f"{len(new)} tensors are not in the source, first {new[0]}"
        problems.append(
            Problem(
                "TS-QUANT-TENSOR-NEW",
                "warning",
                new[0],
                text,
                "check that this is the right source",
            )
        )
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
            problems.append(Problem("TS-QUANT-SHAPE", "error", name, text, AGAIN))
        elif same_format and new.dtype != old.dtype:
            text = f"dtype is {new.dtype}, the source's is {old.dtype}"
            problems.append(Problem("TS-QUANT-DTYPE", "error", name, text, AGAIN))
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

    def __init__(self, derived: LazyTensors, source: LazyTensors) -> None:
        self.derived, self.source = derived, source
        self.problems: list[Problem] = []
        self.errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(
            list
        )  # (error, norm) by class
        self.zero_blocks = 0
        self.packers = {rule: choose_packer(rule) for rule in WEIGHT_SCALES}
        self.alike = dict.fromkeys(WEIGHT_SCALES, 0)
        self.scaled_otherwise: dict[str, float] = {}
        self.packed_otherwise: list[str] = []
        self._amax: dict[str, float] = {}

    def add(self, name: str) -> None:
        new = decoded(self.derived, name)
        old = decoded(self.source, name)
        if new.shape != old.shape:
            return
        if _format(self.derived.checkpoint, name).is_fp4:
            stem = name.removesuffix(".weight")
            scales = {suffix: self.derived[f"{stem}.{suffix}"] for suffix in SCALES}
            self._check_scales(stem, scales)
            self._measure(name, new.float(), old.float())
            if old.dtype is torch.bfloat16 and bool(old.isfinite().all()):
                stored = nvfp4.NVFP4Tensor(
                    self.derived[name], scales["weight_scale"], scales["weight_scale_2"]
                )
                self._pack_again(name, old, stored)
        elif not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (new, old))):
            text = "is stored unquantized but its bytes are not the source's"
            self.problems.append(Problem("TS-QUANT-CHANGED", "error", name, text, AGAIN))

    def _check_scales(self, stem: str, scales: dict[str, torch.Tensor]) -> None:
        for suffix, value in scales.items():
            if not bool((value.float().isfinite() & (value.float() > 0)).all()):
                text = "holds NaN, infinity, zero or a negative number"
                self.problems.append(
                    Problem("TS-QUANT-BAD-SCALE", "error", f"{stem}.{suffix}", text, AGAIN)
                )
        packed = self.derived[f"{stem}.weight"].view(-1, nvfp4.BLOCK // 2)
        self.zero_blocks += int(((packed & 0x77) == 0).all(-1).sum())

    def _measure(self, name: str, new: torch.Tensor, old: torch.Tensor) -> None:
        error, norm = float((new - old).norm()), float(old.norm())
        self.errors[weight_class(name)].append((error, norm))
        relative = error / norm if norm else error
        if not relative <= NVFP4_ERROR_LIMIT:
            text = f"differs from the source by {relative:.3f} of its norm; rounding alone gives about 0.1"
            self.problems.append(Problem("TS-QUANT-ERROR", "error", name, text, AGAIN))

    def _pack_again(self, name: str, old: torch.Tensor, stored: nvfp4.NVFP4Tensor) -> None:
        self._amax[name] = float(old.abs().max())
        scaling = Scaling.of(max(self._amax[name], *self._partners_amax(name), 0.0))
        if float(stored.scale_2) != scaling.scale_2:
            self.scaled_otherwise[name] = float(stored.scale_2) / scaling.scale_2
            return
        if len(self.packed_otherwise) < GIVE_UP or any(self.alike.values()):
            packed, scale = (
                np.empty(stored.packed.shape, np.uint8),
                np.empty(stored.scale.shape, np.uint8),
            )
            for rule in sorted(self.alike, key=lambda rule: -self.alike[rule]):
                self.packers[rule].pack(rows_of(WeightFormat.BF16, old), scaling, packed, scale)
                if np.array_equal(packed, stored.packed) and np.array_equal(
                    scale, stored.scale.view(torch.uint8)
                ):
                    self.alike[rule] += 1
                    return
        self.packed_otherwise.append(name)

    def _partners_amax(self, name: str) -> Iterator[float]:
        """max|w| of the linears that share its scale."""
        for partner in (
            f"{module}.weight" for module in shared_partners(name.removesuffix(".weight"))
        ):
            if partner in self.derived and _format(self.derived.checkpoint, partner).is_fp4:
                if partner not in self._amax:
                    self._amax[partner] = float(decoded(self.source, partner).abs().max())
                yield self._amax[partner]

    def found(self, ours: bool) -> list[Problem]:
        """The problems of all tensors that were added; `ours`: `trtspec quantize` made it, so each byte follows."""
        found, alike = list(self.problems), sum(self.alike.values())
        scaled_alike = alike + len(self.packed_otherwise)
        if ours or scaled_alike >= NEARLY_ALL * (scaled_alike + len(self.scaled_otherwise)):
            for name, ratio in self.scaled_otherwise.items():
                text = f"is {ratio:.6g} times what the largest weight of the source gives"
                where = f"{name.removesuffix('.weight')}.weight_scale_2"
                found.append(Problem("TS-QUANT-SCALE-2", "error", where, text, AGAIN))
        if ours or alike >= NEARLY_ALL * scaled_alike:
            text = "its bytes or block scales are not those that packing the source gives"
            found += [
                Problem("TS-QUANT-BYTES", "error", name, text, AGAIN)
                for name in self.packed_otherwise
            ]
        return found


def _rounding(tensors: list[tuple[float, float]]) -> RoundingError:
    """Of (error, norm) of each tensor."""
    error, norm = (math.hypot(*column) for column in zip(*tensors, strict=True))
    worst = max(one / size if size else one for one, size in tensors)
    return RoundingError(len(tensors), error / norm if norm else 0.0, worst)
