"""A conversion to NVFP4 as asked for: checked before anything is written, estimated without writing."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.checkpoint.detect import target_spec
from trtspec.checkpoint.headers import INDEX_NAME, Checkpoint
from trtspec.errors import TrtspecError, UsageError
from trtspec.formats import WeightFormat
from trtspec.quant.input_scales import InputScales
from trtspec.quant.packing import Rows, Scaling, choose_packer
from trtspec.quant.plan import ShardPlan, class_counts, plan_conversion
from trtspec.quant.policy import Policy, shared_partners
from trtspec.quant.workers import worker_count
from trtspec.report import existing, file_sha256, refuse_overwrite
from trtspec.specs import ModelSpec

JOURNAL_NAME = ".trtspec-quantize.jsonl"
FORMAT_VERSION = 1  # raised when the same options would give other bytes
SPARE_BYTES = 64 << 20  # configs, tokenizer and headers


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
            "policy": asdict(self.policy),
            "kv_cache": self.kv_cache,
            "input_scales": self.scales.digest,
            "weight_scales": self.weight_scales,
            "format_version": FORMAT_VERSION,
        }

    @property
    def bytes_in(self) -> int:
        return sum(plan.bytes_in for plan in self.plans)

    @property
    def bytes_out(self) -> int:
        return sum(plan.bytes_out for plan in self.plans)


@dataclass(frozen=True)
class ConversionOptions:
    """The first three decide the bytes. `input_scales` None is 1.0 everywhere, `workers` 0 one per core. `part` (i, n)
    converts every n-th shard file only; `merge` finishes what the parts wrote."""

    kv_cache: str | None = "fp8"
    input_scales: Path | None = None
    weight_scales: str = "max"
    workers: int = 0
    device: str = "cpu"
    part: tuple[int, int] | None = None
    merge: bool = False


def prepare(source: Path, output: Path, policy: Policy, options: ConversionOptions) -> Conversion:
    """Opens and checks everything that can be told from headers and options; raises TrtspecError or UsageError."""
    checkpoint = Checkpoint.open(source)
    spec = target_spec(checkpoint)
    if spec.quant.format.is_fp4:
        raise UsageError(f"{source} is NVFP4 already", "pass its BF16, FP8 or INT4 source")
    if output.resolve() == source.resolve():
        raise UsageError("source and output are the same directory", "choose another --output")
    scales = InputScales.load(options.input_scales)
    plans = plan_conversion(checkpoint, policy)
    conversion = Conversion(
        checkpoint, spec, output, policy, options.kv_cache, options.input_scales, scales, plans, options.weight_scales
    )
    for plan in plans:
        for weight in plan.weights:
            if weight.action == "quantize":
                scales.scale([weight.module, *shared_partners(weight.module)])
    return conversion


def fingerprint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Tells whether the source is still the one that the journal began with, without reading its weights."""
    shards = {}
    for shard in checkpoint.shards:
        status = (checkpoint.path / shard).stat()
        shards[shard] = [status.st_size, status.st_mtime_ns]
    names = hashlib.sha256(repr(sorted(checkpoint.tensors.items())).encode()).hexdigest()
    return {"config": file_sha256(checkpoint.path / "config.json"), "tensors": names, "shards": shards}


def begun_in(output: Path, journal: str, force: bool) -> bool:
    """Whether an earlier run is resumed. Raises UsageError when `output` holds what is not a conversion of ours."""
    begun = (output / journal).exists()
    if not begun and not any(output.glob(".trtspec-quantize*.jsonl")):
        refuse_overwrite(output, force)
    return begun


def claim_output(conversion: Conversion, restart: bool, force: bool, journal: str = JOURNAL_NAME) -> bool:
    """Makes the output directory ours, or says why it cannot be. True when a new conversion begins there."""
    output = conversion.output
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".trtspec-{os.getpid()}.partial"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrtspecError(f"cannot write {output}: {error.strerror}", "choose another --output") from None
    begun = begun_in(output, journal, force)
    free = shutil.disk_usage(output).free
    mine = [output / plan.shard for plan in conversion.plans]
    present = sum(path.stat().st_size for path in mine if path.exists())
    if free + present < conversion.bytes_out + SPARE_BYTES:
        raise TrtspecError(
            f"{output} needs {conversion.bytes_out:,} bytes and its disk has {free:,} free",
            "free space, or choose an --output on another disk",
        )
    return restart or not begun


def clear_output(conversion: Conversion, fresh: bool, whole: bool = True) -> None:
    """Removes what a killed run left half-written and, for a new conversion, the weights that were there before.

    Of an output that is not `whole` ours, only the files of our shards.
    """
    output = conversion.output
    patterns = [".*.partial"] if whole else [f".{plan.shard}.*.partial" for plan in conversion.plans]
    if fresh:
        patterns += ["config.json", INDEX_NAME]
        patterns += ["*.safetensors"] if whole else [plan.shard for plan in conversion.plans]
    for pattern in patterns:
        for path in output.glob(pattern):
            path.unlink(missing_ok=True)


def estimate(conversion: Conversion, workers: int) -> dict[str, Any]:
    """Sizes, counts and an estimate of the time; writes nothing."""
    actions = [weight.action for plan in conversion.plans for weight in plan.weights]
    count = worker_count(workers, conversion.plans)
    elements = sum(
        weight.shape[0] * weight.shape[1]
        for plan in conversion.plans
        for weight in plan.weights
        if weight.action == "quantize"
    )
    per_element = _seconds_per_element(conversion.weight_scales)
    return {
        "output": str(conversion.output),
        "policy": conversion.policy.name,
        "quantized": actions.count("quantize"),
        "decoded": actions.count("decode"),
        "copied": actions.count("copy"),
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
        "tensors_by_class": class_counts(conversion.plans),
        "exclude_modules": conversion.policy.exclude_patterns(conversion.spec),
        "workers": count,
        "packing_seconds_estimate": round(per_element * elements / count, 1),
        "free_bytes": shutil.disk_usage(existing(conversion.output)).free,
        "dry_run": True,
    }


def _seconds_per_element(weight_scales: str) -> float:
    """Of packing one expert-like matrix; the second time, when its pages are there."""
    packer, rows = choose_packer(weight_scales), Rows(WeightFormat.BF16, torch.randn(512, 4096).to(torch.bfloat16))
    target = torch.empty(512, 2048, dtype=torch.uint8), torch.empty(512, 256, dtype=torch.uint8)
    for _ in range(2):
        begin = time.monotonic()
        packer.pack(rows, Scaling.of(packer.amax(rows)), *target)
    return (time.monotonic() - begin) / rows.values.numel()
