"""A conversion to NVFP4, tensor by tensor, decided before the first byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trtspec.checkpoint.headers import Checkpoint, TensorInfo
from trtspec.checkpoint.hub import source_name
from trtspec.checkpoint.target_problems import ReadTarget, read_target, refusal
from trtspec.checkpoint.values import target_value_problems
from trtspec.checkpoint.writer import byte_count
from trtspec.errors import Problem, TrtspecError, UsageError, has_errors
from trtspec.families.family import Family
from trtspec.foreign import PlainName
from trtspec.formats import (
    NVFP4_BLOCK,
    SIDE_PARTS,
    VALUE_SUFFIXES,
    WeightFormat,
    stored_format,
)
from trtspec.quant.policy import (
    INPUT_SCALES,
    KV_CACHES,
    WEIGHT_SCALES,
    InputScales,
    Policy,
    default_policy,
)
from trtspec.specs import ModelSpec

FORMAT_VERSION = 3  # raised when the same options would give other bytes or another journal
Action = Literal["quantize", "decode", "copy"]
Entry = tuple[str, tuple[int, ...]]  # dtype code and shape of a stored tensor


@dataclass(frozen=True)
class ConversionOptions:
    """How a source is converted. The first three options decide the bytes.

    Args:
        input_scales: file of activation scales, None for 1.0 everywhere.
        weight_scales: a key of WEIGHT_SCALES, None for the policy's.
        workers: threads. 0: as many as cores and memory allow.
        by_modelopt: ModelOpt's own class packs the weights.
    """

    kv_cache: str | None = "fp8"
    input_scales: Path | None = None
    weight_scales: str | None = None
    workers: int = 0
    device: str = "cpu"
    by_modelopt: bool = False


@dataclass(frozen=True)
class Conversion:
    """A checked request: nothing has been written yet. No problem of the source is an error."""

    checkpoint: Checkpoint
    spec: ModelSpec
    output: Path
    policy: Policy
    options: ConversionOptions
    scales: InputScales
    weight_scales: str
    plans: list[ShardPlan]
    problems: list[Problem]

    @property
    def decisive_options(self) -> dict[str, Any]:
        """Everything but the source that decides the output's bytes."""
        policy = {
            "name": self.policy.name,
            "quantize": self.policy.quantize,
            "exclude": self.policy.exclude_patterns(self.spec),
        }
        return {
            "policy": policy,
            "kv_cache": self.options.kv_cache,
            "input_scales": self.scales.digest,
            "weight_scales": self.weight_scales,
            "format_version": FORMAT_VERSION,
        }

    @property
    def deviations(self) -> list[str]:
        """A sentence for each option that differs from what the policy's publisher did."""
        policy = self.policy
        input_scales = "one" if self.options.input_scales is None else "calibrated"
        kv_cache = self.options.kv_cache or "none"
        choices = (
            ("weight scales", WEIGHT_SCALES, policy.weight_scales, self.weight_scales),
            ("activation scales", INPUT_SCALES, policy.input_scales, input_scales),
            ("KV cache", KV_CACHES, policy.kv_cache, kv_cache),
        )
        publisher = policy.source.partition(",")[0]
        deviations = []
        for subject, titles, published, chosen in choices:
            if chosen != published:
                text = f"{subject}: {titles[chosen]}; {publisher} has them {titles[published]}"
                deviations.append(text)
        return deviations

    @cached_property  # read for the progress after each tensor
    def bytes_in(self) -> int:
        return sum(plan.bytes_in for plan in self.plans)

    @cached_property
    def bytes_out(self) -> int:
        return sum(plan.bytes_out for plan in self.plans)


def prepare(
    source: Path | Checkpoint, output: Path, policy: Policy | None, options: ConversionOptions
) -> Conversion:
    """Opens the source and checks everything that headers and options show.

    Raises TrtspecError or UsageError. `policy` None: the policy of the source's release.
    """
    target = read_target(source)
    checkpoint = target.checkpoint
    spec = target.spec
    problems = target.problems
    if checkpoint.remote is None:
        # NaN and infinity are left to the conversion, which names the tensor and the index.
        value_problems = target_value_problems(target)
        problems = problems + [
            problem for problem in value_problems if problem.code != "TS-TARGET-NOT-FINITE"
        ]
    if has_errors(problems):
        raise refusal(checkpoint.path, problems)
    refuse_fp4(str(checkpoint.path), spec.quant.format)
    if output.resolve() == checkpoint.path.resolve():
        raise UsageError("source and output are the same directory", "choose another `output`")
    policy = policy or default_policy(spec, source_name(checkpoint.path))
    scales = InputScales.load(options.input_scales, checkpoint)
    plans = plan_conversion(target, policy, scales)
    weight_scales = options.weight_scales or policy.weight_scales
    return Conversion(
        checkpoint, spec, output, policy, options, scales, weight_scales, plans, problems
    )


def refuse_fp4(name: str, stored: WeightFormat) -> None:
    """Raises UsageError for a checkpoint that is NVFP4 already."""
    if stored.is_fp4:
        remedy = f"`trtspec serve {name}` takes it as it is; else quantize its source"
        raise UsageError(f"{name} is NVFP4 already", remedy)


@dataclass(frozen=True)
class Weight:
    """A tensor by its plain name. `parts`: the stored tensors of its values. `shape`: decoded."""

    name: str
    action: Action
    parts: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    format: WeightFormat = WeightFormat.BF16

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def bytes_in(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def layout(self) -> dict[str, Entry]:
        """The tensors that are written for it, by name."""
        if self.action == "copy":
            stored = self.parts[0]
            return {self.name: (stored.dtype, stored.shape)}
        if self.action == "decode":
            return {self.name: ("BF16", self.shape)}
        rows, columns = self.shape
        storage = WeightFormat.NVFP4.storage
        shapes = WeightFormat.NVFP4.part_shapes(rows, columns)
        layout = {}
        for suffix, dtypes in zip(storage.all_parts, storage.dtypes, strict=True):
            layout[f"{self.module}.{suffix}"] = (dtypes[0], shapes[suffix][0])
        return layout


@dataclass(frozen=True)
class Group:
    """Linears of one shard that share their scales. Other tensors are groups of one.

    `partners` are linears of other shards with the same scales, read for their maximum only.
    """

    weights: tuple[Weight, ...]
    partners: tuple[Weight, ...] = ()
    input_scale: float = 1.0


@dataclass(frozen=True)
class ShardPlan:
    """An output shard, named after the source shard that holds the values of its tensors.

    `groups` hold `weights` in the order of their conversion.
    """

    shard: PlainName
    weights: tuple[Weight, ...]
    groups: tuple[Group, ...]

    def layout(self) -> dict[str, Entry]:
        """The tensors of the output shard, by name."""
        layout: dict[str, Entry] = {}
        for weight in self.weights:
            layout |= weight.layout()
        return layout

    @property
    def sources(self) -> list[str]:
        """Names of the source shards that are read for it."""
        shards = set[str]()
        for group in self.groups:
            for weight in (*group.weights, *group.partners):
                shards.update(part.shard for part in weight.parts)
        return sorted(shards)

    def source_times(self, source: Path) -> dict[str, int]:
        """When those shards of the directory `source` were last written, in nanoseconds."""
        return {name: (source / name).stat().st_mtime_ns for name in self.sources}

    @property
    def bytes_in(self) -> int:
        return sum(weight.bytes_in for weight in self.weights)

    @property
    def bytes_out(self) -> int:
        return sum(byte_count(*entry) for entry in self.layout().values())


def plan_conversion(target: ReadTarget, policy: Policy, scales: InputScales) -> list[ShardPlan]:
    """The output shards in source order. The stored parts of each linear were checked before.

    Raises TrtspecError naming the tensor if an input scale is missing, if K is not a multiple of
    16, or if a quantized tensor is not a linear of the model.
    """
    checkpoint = target.checkpoint
    weights_by_shard = dict[str, list[Weight]]()
    quantized = dict[str, Weight]()
    for info in checkpoint.tensors.values():
        weight = _weight(target, info, policy)
        if weight is None:
            continue
        weights_by_shard.setdefault(info.shard, []).append(weight)
        if weight.action == "quantize":
            quantized[weight.module] = weight
    plans = []
    for shard in checkpoint.shards:
        weights = weights_by_shard.get(shard)
        if weights:
            groups = _groups(weights, quantized, scales, target.spec.family)
            plans.append(ShardPlan(shard, tuple(weights), tuple(groups)))
    return plans


def _weight(target: ReadTarget, info: TensorInfo, policy: Policy) -> Weight | None:
    """The weight whose values the stored tensor `info` holds. None for a scale or a shape.

    Raises TrtspecError if the tensor cannot be converted.
    """
    stored = target.checkpoint.tensors
    module, _, suffix = info.name.rpartition(".")
    format = target.formats.get(module)
    if format is None:
        other = stored_format(stored, module)
        if not other.is_plain:
            text = (
                f"{info.name} is stored as {other.storage.title}, "
                "and is not a linear of the language model"
            )
            raise TrtspecError(text, "pass a checkpoint that keeps it in BF16")
        return Weight(info.name, "copy", (info,), info.shape)
    if suffix not in format.parts:
        return Weight(info.name, "copy", (info,), info.shape)
    if suffix != format.parts[0]:
        return None
    name = f"{module}.weight"
    rows, elements = info.shape
    shape = (rows, elements * format.values_per_element)
    action: Action = "copy" if format.is_plain else "decode"
    if target.roles[module] in policy.quantize:
        _check_quantizable(name, shape, info.dtype if format.is_plain else "BF16")
        action = "quantize"
    parts = tuple(stored[f"{module}.{part}"] for part in format.parts)
    return Weight(name, action, parts, shape, format)


def _check_quantizable(name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Raises TrtspecError if NVFP4 has no encoding of such a weight."""
    if dtype != "BF16":
        text = f"{name} is {dtype}, and BF16, FP8 or INT4 becomes NVFP4"
        raise TrtspecError(text, "save the checkpoint in BF16")
    if shape[1] % NVFP4_BLOCK:
        text = (
            f"{name} has shape {list(shape)}, "
            f"which has no whole blocks of {NVFP4_BLOCK} along its rows"
        )
        raise TrtspecError(text, "compare config.json with that of the published model")


def _groups(
    weights: list[Weight], quantized: dict[str, Weight], scales: InputScales, family: Family
) -> Iterator[Group]:
    """Groups of one shard's `weights` in file order. `quantized`: every linear to quantize."""
    in_shard = {weight.module for weight in weights if weight.action == "quantize"}
    grouped = set[str]()
    for weight in weights:
        if weight.action != "quantize":
            yield Group((weight,))
            continue
        if weight.module in grouped:
            continue
        sharing = [other for other in family.partners(weight.module) if other in quantized]
        members = (weight, *(quantized[other] for other in sharing if other in in_shard))
        partners = tuple(quantized[other] for other in sharing if other not in in_shard)
        grouped.update(member.module for member in members)
        modules = [member.module for member in (*members, *partners)]
        yield Group(members, partners, scales.scale(modules))


def plain_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Plain name of each weight -> the stored tensor with its values, in stored order.

    Scales and shapes of quantized weights have no name of their own.
    """
    names = {}
    for name in stored:
        stem, _, suffix = name.rpartition(".")
        has_values = any(f"{stem}.{values}" in stored for values in VALUE_SUFFIXES)
        if suffix in SIDE_PARTS and has_values:
            continue
        plain_name = f"{stem}.weight" if suffix in VALUE_SUFFIXES else name
        names[plain_name] = name
    return names
