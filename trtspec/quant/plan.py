"""What a conversion to NVFP4 will do, tensor by tensor, decided before the first byte is read."""

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
Entry = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weight:
    """One tensor by its plain name. `parts` are the stored tensors it is read from, `shape` is [N, K] decoded."""

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
        """The tensors that are written for it: name -> dtype code and shape."""
        if self.action == "copy":
            return {self.name: (self.parts[0].dtype, self.parts[0].shape)}
        if self.action == "decode":
            return {self.name: ("BF16", self.shape)}
        rows, columns = self.shape
        storage, shapes = WeightFormat.NVFP4.storage, WeightFormat.NVFP4.part_shapes(rows, columns)
        parts = zip(storage.all_parts, storage.dtypes, strict=True)
        return {
            f"{self.module}.{suffix}": (dtypes[0], shapes[suffix][0]) for suffix, dtypes in parts
        }


@dataclass(frozen=True)
class Group:
    """Linears of one shard that share their scales, and their partners in other shards, read for the maximum only. A
    tensor that is copied or decoded is a group of its own."""

    weights: tuple[Weight, ...]
    partners: tuple[Weight, ...] = ()
    input_scale: float = 1.0


@dataclass(frozen=True)
class ShardPlan:
    """An output shard has the name of the source shard that holds its tensors' values. `groups` hold `weights` in the
    order in which they are converted."""

    shard: PlainName
    weights: tuple[Weight, ...]
    groups: tuple[Group, ...]

    def layout(self) -> dict[str, Entry]:
        return {name: entry for weight in self.weights for name, entry in weight.layout().items()}

    @property
    def sources(self) -> list[str]:
        """The source shards that are read for it."""
        members = (member for group in self.groups for member in (*group.weights, *group.partners))
        return sorted({part.shard for member in members for part in member.parts})

    def source_times(self, source: Path) -> dict[str, int]:
        """When those shards were last written, in nanoseconds."""
        return {name: (source / name).stat().st_mtime_ns for name in self.sources}

    @property
    def bytes_in(self) -> int:
        return sum(weight.bytes_in for weight in self.weights)

    @property
    def bytes_out(self) -> int:
        return sum(byte_count(*entry) for entry in self.layout().values())


@dataclass(frozen=True)
class ConversionOptions:
    """The first three decide the bytes. `input_scales` None is 1.0 everywhere, `weight_scales` None the policy's.
    `workers` are threads, 0: as many as cores and memory allow. With `by_modelopt` ModelOpt quantizes."""

    kv_cache: str | None = "fp8"
    input_scales: Path | None = None
    weight_scales: str | None = None
    workers: int = 0
    device: str = "cpu"
    by_modelopt: bool = False


@dataclass(frozen=True)
class Conversion:
    """One request, checked: nothing has been written yet. `problems` are those of the source, none of them an error."""

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
    def decisive(self) -> dict[str, Any]:
        """What decides the output's bytes, besides the source."""
        return {
            "policy": {
                "name": self.policy.name,
                "quantize": self.policy.quantize,
                "exclude": self.policy.exclude_patterns(self.spec),
            },
            "kv_cache": self.options.kv_cache,
            "input_scales": self.scales.digest,
            "weight_scales": self.weight_scales,
            "format_version": FORMAT_VERSION,
        }

    @property
    def deviations(self) -> list[str]:
        """Where the options do otherwise than the publisher of the policy."""
        policy, calibrated = (
            self.policy,
            "one" if self.options.input_scales is None else "calibrated",
        )
        chosen = (
            ("weight scales", WEIGHT_SCALES, policy.weight_scales, self.weight_scales),
            ("activation scales", INPUT_SCALES, policy.input_scales, calibrated),
            ("KV cache", KV_CACHES, policy.kv_cache, self.options.kv_cache or "none"),
        )
        publisher = policy.source.partition(",")[0]
        return [
            f"{what}: {table[here]}; {publisher} has them {table[there]}"
            for what, table, there, here in chosen
            if there != here
        ]

    @cached_property  # for the progress after each tensor
    def bytes_in(self) -> int:
        return sum(plan.bytes_in for plan in self.plans)

    @cached_property
    def bytes_out(self) -> int:
        return sum(plan.bytes_out for plan in self.plans)


def prepare(
    source: Path | Checkpoint, output: Path, policy: Policy | None, options: ConversionOptions
) -> Conversion:
    """Opens and checks everything that headers and options show; raises TrtspecError or UsageError. `policy` None: that
    of the source's release."""
    target = read_target(source)
    checkpoint, spec, problems = target.checkpoint, target.spec, target.problems
    if checkpoint.remote is None:
        values = target_value_problems(target)
        problems = problems + [
            one for one in values if one.code != "TS-TARGET-NOT-FINITE"
        ]  # the pass names it
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


def plan_conversion(target: ReadTarget, policy: Policy, scales: InputScales) -> list[ShardPlan]:
    """The output shards in source order. The parts of the target's linears were checked.

    Raises TrtspecError naming the tensor for a missing input scale, a K that is not a multiple of 16 and a quantized
    tensor that is not a linear of the model.
    """
    checkpoint, family = target.checkpoint, target.spec.family
    shards, quantized = dict[str, list[Weight]](), dict[str, Weight]()
    for info in checkpoint.tensors.values():
        weight = _weight(target, info, policy)
        if weight is None:
            continue
        shards.setdefault(info.shard, []).append(weight)
        if weight.action == "quantize":
            quantized[weight.module] = weight
    return [
        ShardPlan(
            shard, tuple(shards[shard]), tuple(_groups(shards[shard], quantized, scales, family))
        )
        for shard in checkpoint.shards
        if shard in shards
    ]


def _groups(
    weights: list[Weight], quantized: dict[str, Weight], scales: InputScales, family: Family
) -> Iterator[Group]:
    """Groups in file order; partners of other shards come from `quantized`, all linears that become NVFP4."""
    here, seen = {weight.module for weight in weights if weight.action == "quantize"}, set[str]()
    for weight in weights:
        if weight.action != "quantize":
            yield Group((weight,))
        elif weight.module not in seen:
            others = family.partners(weight.module)
            members = (weight, *(quantized[other] for other in others if other in here))
            seen |= {member.module for member in members}
            elsewhere = tuple(
                quantized[other] for other in others if other in quantized and other not in here
            )
            input_scale = scales.scale([member.module for member in (*members, *elsewhere)])
            yield Group(members, elsewhere, input_scale)


def plain_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Plain name -> the stored tensor that carries its values, in stored order; scales and shapes are not names."""
    found = {}
    for name in stored:
        stem, _, suffix = name.rpartition(".")
        if suffix in SIDE_PARTS and any(f"{stem}.{values}" in stored for values in VALUE_SUFFIXES):
            continue
        found[f"{stem}.weight" if suffix in VALUE_SUFFIXES else name] = name
    return found


def _weight(target: ReadTarget, info: TensorInfo, policy: Policy) -> Weight | None:
    """The weight whose values a tensor holds; None for a tensor beside them."""
    stored = target.checkpoint.tensors
    module, _, suffix = info.name.rpartition(".")
    format = target.formats.get(module)
    if format is None:
        other = stored_format(stored, module)
        if not other.is_plain:
            text = f"{info.name} is stored as {other.storage.title}, and is not a linear of the language model"
            raise TrtspecError(text, "pass a checkpoint that keeps it in BF16")
        return Weight(info.name, "copy", (info,), info.shape)
    if suffix not in format.parts:
        return Weight(info.name, "copy", (info,), info.shape)
    if suffix != format.parts[0]:
        return None
    name = f"{module}.weight"
    parts = tuple(stored[f"{module}.{part}"] for part in format.parts)
    shape = (info.shape[0], info.shape[1] * format.values_per_element)
    if target.roles[module] in policy.quantize:
        _check_block(name, shape, info.dtype if format.is_plain else "BF16")
        return Weight(name, "quantize", parts, shape, format)
    return Weight(name, "copy" if format.is_plain else "decode", parts, shape, format)


def _check_block(name: str, shape: tuple[int, ...], dtype: str) -> None:
    if dtype != "BF16":
        text = f"{name} is {dtype}, and BF16, FP8 or INT4 becomes NVFP4"
        raise TrtspecError(text, "save the checkpoint in BF16")
    if shape[1] % NVFP4_BLOCK:
        text = f"{name} has shape {list(shape)}, which has no whole blocks of {NVFP4_BLOCK} along its rows"
        raise TrtspecError(text, "compare config.json with that of the published model")
