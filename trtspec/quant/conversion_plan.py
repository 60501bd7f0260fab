"""Plan of a conversion to NVFP4: the action for each tensor, decided from the headers."""

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

# Part of the journal's header. To increase if the same options would give other bytes or another
# journal, so that no call resumes an incompatible conversion.
FORMAT_VERSION = 3
Action = Literal["quantize", "decode", "copy"]
Entry = tuple[str, tuple[int, ...]]  # dtype code and shape of a stored tensor


@dataclass(frozen=True)
class ConversionOptions:
    """Options of a conversion. The first three options decide the output's bytes.

    Args:
        kv_cache: data type of the KV cache for the configs, "fp8". None: as the engine chooses.
        input_scales: file of activation scales. None: 1.0 for every linear.
        weight_scales: rule for the block scales, a key of WEIGHT_SCALES. None: the policy's rule.
        workers: number of threads. 0: as many as cores and memory allow.
        device: torch device of the computation.
        by_modelopt: whether ModelOpt's own class packs the weights.
    """

    kv_cache: str | None = "fp8"
    input_scales: Path | None = None
    weight_scales: str | None = None
    workers: int = 0
    device: str = "cpu"
    by_modelopt: bool = False


@dataclass(frozen=True)
class Conversion:
    """A checked conversion, before anything is written.

    checkpoint: the source.
    spec: architecture of the model.
    output: directory to write.
    policy: linears to quantize.
    options: options of the conversion.
    scales: activation scales.
    weight_scales: rule for the block scales, a key of WEIGHT_SCALES.
    plans: plans of the output shards, in source order.
    problems: warnings about the source.
    """

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
        """Options that decide the output's bytes, together with the source, by their JSON key."""
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

    @cached_property  # cached, because the progress bar reads it after each tensor
    def bytes_in(self) -> int:
        """Number of bytes of the source's tensors."""
        return sum(plan.bytes_in for plan in self.plans)

    @cached_property
    def bytes_out(self) -> int:
        """Number of bytes of the output's tensors."""
        return sum(plan.bytes_out for plan in self.plans)


def prepare(
    source: Path | Checkpoint, output: Path, policy: Policy | None, options: ConversionOptions
) -> Conversion:
    """Opens the source, checks headers and options, and plans the conversion.

    Raises TrtspecError if the source has an error or cannot be converted. Raises UsageError if an
    option is wrong, or if the source is NVFP4 already.

    Args:
        source: directory of the source, or an opened checkpoint.
        output: directory to write.
        policy: linears to quantize. None: the policy of the source's release.
        options: options of the conversion.
    """
    target = read_target(source)
    checkpoint = target.checkpoint
    spec = target.spec
    problems = target.problems
    if checkpoint.remote is None:
        # The conversion itself reports NaN and infinity, with tensor and index.
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
    """Raises UsageError if the checkpoint `name`, which is stored as `stored`, is FP4 already."""
    if stored.is_fp4:
        remedy = f"`trtspec serve {name}` takes it as it is; else quantize its source"
        raise UsageError(f"{name} is NVFP4 already", remedy)


@dataclass(frozen=True)
class Weight:
    """A weight or other tensor of the source, and the action that converts it.

    name: plain name, such as `model.norm.weight`, for any storage format.
    action: action of the conversion.
    parts: stored tensors, values first.
    shape: shape after decoding.
    format: storage format of the source.
    """

    name: str
    action: Action
    parts: tuple[TensorInfo, ...]
    shape: tuple[int, ...]
    format: WeightFormat = WeightFormat.BF16

    @property
    def module(self) -> str:
        """Name of the module that has the weight."""
        return self.name.removesuffix(".weight")

    @property
    def bytes_in(self) -> int:
        """Number of bytes of the stored tensors."""
        return sum(part.nbytes for part in self.parts)

    def layout(self) -> dict[str, Entry]:
        """Returns dtype and shape of the tensors to write for this weight, by name."""
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
    """Linears of one shard that share `weight_scale_2`, or one tensor that is not quantized.

    weights: weights that are converted together.
    partners: linears of other shards that share the scale. Only their maximum is needed.
    input_scale: activation scale of the linears.
    """

    weights: tuple[Weight, ...]
    partners: tuple[Weight, ...] = ()
    input_scale: float = 1.0


@dataclass(frozen=True)
class ShardPlan:
    """Plan of an output shard.

    shard: file name, which is also the name of the source shard with the tensors' values.
    weights: weights of the shard, in file order.
    groups: the same weights in groups, in the order of their conversion.
    """

    shard: PlainName
    weights: tuple[Weight, ...]
    groups: tuple[Group, ...]

    def layout(self) -> dict[str, Entry]:
        """Returns dtype and shape of the output shard's tensors, by name."""
        layout: dict[str, Entry] = {}
        for weight in self.weights:
            layout |= weight.layout()
        return layout

    @property
    def sources(self) -> list[str]:
        """Sorted names of the source shards that the conversion of this shard reads."""
        shards = set[str]()
        for group in self.groups:
            for weight in (*group.weights, *group.partners):
                shards.update(part.shard for part in weight.parts)
        return sorted(shards)

    def source_times(self, source: Path) -> dict[str, int]:
        """Returns the time of the last write of each file in `sources`, in nanoseconds.

        `source`: directory of the source.
        """
        return {name: (source / name).stat().st_mtime_ns for name in self.sources}

    @property
    def bytes_in(self) -> int:
        """Number of bytes of the source's tensors of this shard."""
        return sum(weight.bytes_in for weight in self.weights)

    @property
    def bytes_out(self) -> int:
        """Number of bytes of the output shard's tensors."""
        return sum(byte_count(*entry) for entry in self.layout().values())


def plan_conversion(target: ReadTarget, policy: Policy, scales: InputScales) -> list[ShardPlan]:
    """Returns the plans of the output shards, in source order.

    Raises TrtspecError with the tensor's name if an input scale is missing, or if a row is not a
    multiple of 16 values. Also raises it if a quantized tensor is not a linear of the language
    model.

    Args:
        target: the source, whose stored tensors are checked.
        policy: linears to quantize.
        scales: activation scales.
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
    """Returns the weight whose values are in the stored tensor `info`.

    None if the tensor holds the scales or the shape of another tensor. Raises TrtspecError if the
    tensor cannot be converted.
    """
    stored = target.checkpoint.tensors
    module, _, suffix = info.name.rpartition(".")
    format = target.formats.get(module)
    if format is None:
        # The module is not a linear of the language model.
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
    """Raises TrtspecError if a weight with this decoded shape and dtype cannot become NVFP4."""
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
    """Yields the groups of one shard, in file order.

    Args:
        weights: weights of the shard, in file order.
        quantized: all weights to quantize, of all shards, by module.
        scales: activation scales.
        family: model family, which knows the linears that share a scale.
    """
    in_shard = {weight.module for weight in weights if weight.action == "quantize"}
    grouped = set[str]()
    for weight in weights:
        if weight.action != "quantize":
            yield Group((weight,))
            continue
        if weight.module in grouped:  # together with an earlier linear of the same scale
            continue
        sharing = [other for other in family.partners(weight.module) if other in quantized]
        members = (weight, *(quantized[other] for other in sharing if other in in_shard))
        partners = tuple(quantized[other] for other in sharing if other not in in_shard)
        grouped.update(member.module for member in members)
        modules = [member.module for member in (*members, *partners)]
        yield Group(members, partners, scales.scale(modules))


def plain_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Returns the name of the stored tensor with a weight's values, by plain name of the weight.

    A plain name, such as `model.norm.weight`, does not depend on the storage format. Scales and
    shapes of quantized weights are left out.
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
