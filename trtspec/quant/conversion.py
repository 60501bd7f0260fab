"""A conversion to NVFP4 as asked for: checked before anything is written, estimated without writing. Then the records
that `quantize` and `calibrate` report, whose fields are the keys of their `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.target_problems import require_target
from trtspec.errors import UsageError
from trtspec.quant.native import seconds_per_element
from trtspec.quant.plan import ShardPlan, class_counts, plain_names, plan_conversion
from trtspec.quant.policy import ACCEPT, InputScales, Policy
from trtspec.quant.workers import worker_count
from trtspec.specs import ModelSpec

FORMAT_VERSION = 2  # raised when the same options would give other bytes


@dataclass(frozen=True)
class ConversionOptions:
    """The first three decide the bytes. `input_scales` None is 1.0 everywhere, `weight_scales` None the policy's.
    `accept_input_scales` takes a scale file that is not bound to the source. `workers` 0 is one per core. With
    `by_modelopt` ModelOpt quantizes."""

    kv_cache: str | None = "fp8"
    input_scales: Path | None = None
    weight_scales: str | None = None
    accept_input_scales: bool = False
    workers: int = 0
    device: str = "cpu"
    by_modelopt: bool = False


@dataclass(frozen=True)
class Conversion:
    """One request, checked: nothing has been written yet."""

    checkpoint: Checkpoint
    spec: ModelSpec
    output: Path
    policy: Policy
    kv_cache: str | None
    input_scales: Path | None
    scales: InputScales
    plans: list[ShardPlan]
    weight_scales: str = "max"

    @property
    def options(self) -> dict[str, Any]:
        """What decides the output's bytes, besides the source."""
        return {
            "policy": {
                "name": self.policy.name,
                "quantize": list(self.policy.quantize),
                "exclude": self.policy.exclude_patterns(self.spec),
            },
            "kv_cache": self.kv_cache,
            "input_scales": self.scales.digest,
            "weight_scales": self.weight_scales,
            "format_version": FORMAT_VERSION,
        }

    @property
    def deviations(self) -> list[str]:
        """Where the options do otherwise than the publisher of the policy."""
        calibrated = "one" if self.input_scales is None else "calibrated"
        return self.policy.deviations(self.weight_scales, calibrated, self.kv_cache)

    @property
    def bytes_in(self) -> int:
        return sum(plan.bytes_in for plan in self.plans)

    @property
    def bytes_out(self) -> int:
        return sum(plan.bytes_out for plan in self.plans)


def prepare(source: Path | Checkpoint, output: Path, policy: Policy, options: ConversionOptions) -> Conversion:
    """Opens and checks everything that can be told from headers and options; raises TrtspecError or UsageError."""
    target = require_target(source)
    checkpoint, spec = target.checkpoint, target.spec
    if spec.quant.format.is_fp4:
        raise UsageError(f"{checkpoint.path} is NVFP4 already", "pass its BF16, FP8 or INT4 source")
    if output.resolve() == checkpoint.path.resolve():
        raise UsageError("source and output are the same directory", "choose another --output")
    if options.accept_input_scales and options.input_scales is None:
        raise UsageError(f"{ACCEPT} is given without a file of scales", "add --input-scales FILE, or leave it out")
    scales = InputScales.load(options.input_scales)
    names = [name for name in plain_names(checkpoint.tensors) if name.endswith(".weight")]
    scales.check(checkpoint, [name.removesuffix(".weight") for name in names], options.accept_input_scales)
    plans = plan_conversion(checkpoint, policy, scales, spec.quant.block_size)
    weight_scales = options.weight_scales or policy.weight_scales
    return Conversion(
        checkpoint, spec, output, policy, options.kv_cache, options.input_scales, scales, plans, weight_scales
    )


def estimate(conversion: Conversion, workers: int) -> QuantizePlan:
    """Sizes, counts and an estimate of the time; writes nothing."""
    actions = [weight.action for plan in conversion.plans for weight in plan.weights]
    count = worker_count(workers, conversion.plans)
    elements = sum(
        weight.shape[0] * weight.shape[1]
        for plan in conversion.plans
        for weight in plan.weights
        if weight.action == "quantize"
    )
    per_element = seconds_per_element(conversion.weight_scales)
    return QuantizePlan(
        output=str(conversion.output),
        policy=conversion.policy.name,
        published=conversion.policy.published_as,
        weight_scales=conversion.weight_scales,
        deviations=conversion.deviations,
        quantized=actions.count("quantize"),
        decoded=actions.count("decode"),
        copied=actions.count("copy"),
        bytes_in=conversion.bytes_in,
        bytes_out=conversion.bytes_out,
        tensors_by_class=class_counts(conversion.plans),
        exclude_modules=conversion.policy.exclude_patterns(conversion.spec),
        workers=count,
        packing_seconds_estimate=round(per_element * elements / count, 1),
        free_bytes=machine.free_disk(conversion.output),
    )


@dataclass(frozen=True, kw_only=True)
class LinearErrors:
    """Of one class of linears: how far the dequantized weights are from the source's, relative to their norm."""

    tensors: int
    relative_error: float
    zero_blocks: int


@dataclass(frozen=True, kw_only=True)
class QuantizeSize:
    """What a quantization covers: tensors by what happens to them, bytes read and written. `deviations` name what is
    done otherwise than the policy's publisher did."""

    output: str
    policy: str
    weight_scales: str
    deviations: list[str]
    quantized: int
    decoded: int
    copied: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, kw_only=True)
class Quantized(QuantizeSize):
    """What was written; `classes` by kind of linear."""

    classes: dict[str, LinearErrors]
    zero_tensors: list[str]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    shards_resumed: int = 0


@dataclass(frozen=True, kw_only=True)
class QuantizePlan(QuantizeSize):
    """What a run would write, and whether it would go on with an earlier one; nothing was written. `published` is the
    checkpoint that the policy was read from; `hub`: id, revision and bytes read of a source whose headers were read
    there."""

    published: str
    tensors_by_class: dict[str, int]
    exclude_modules: list[str]
    workers: int
    packing_seconds_estimate: float
    free_bytes: int
    device: str = "cpu"
    resumes: bool = False
    hub: dict[str, Any] | None = None
    dry_run: bool = True


@dataclass(frozen=True, kw_only=True)
class CalibrationSize:
    """What a calibration covers."""

    output: str
    policy: str
    dtype: str
    device: str
    texts: int
    tokens: int
    layers: int
    linears: int


@dataclass(frozen=True, kw_only=True)
class Calibrated(CalibrationSize):
    """The scales that were written. `unreached`: by layer, the experts that no token was given; `dead_inputs` were
    always zero; `input_scale`: min, median and max."""

    sha256: str
    experts: int
    experts_unreached: int
    unreached: dict[str, list[int]]
    dead_inputs: list[str]
    input_scale: dict[str, float]
    layers_resumed: int
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan(CalibrationSize):
    """What a run would read, hold and write; nothing was written."""

    layer_bytes: int
    states_bytes: int
    states_in_memory: bool
    load_ahead: bool
    memory_bytes_estimate: int
    disk_bytes: int
    free_bytes: int
    bytes_read: int
    resumes: bool
    dry_run: bool = True


def to_json(result: Quantized | QuantizePlan | Calibrated | CalibrationPlan) -> dict[str, Any]:
    """The object of `--json`; `hub` only where the source was read there."""
    return {key: value for key, value in asdict(result).items() if key != "hub" or value is not None}
