"""Defines `trtspec quantize`, which converts a BF16, FP8-block or INT4 checkpoint to NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from trtspec.errors import check_failure
from trtspec.machine import check_device
from trtspec.records import JsonOption, fill, option
from trtspec.report import Result, Table, next_command, progress_bar, value_table
from trtspec.verbs.options import OutputFlags, PolicyOption, SourceArgument


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(OutputFlags):
    """Options of `trtspec quantize`."""

    source: SourceArgument
    output: Annotated[Path, option("Directory for the NVFP4 checkpoint.", "-o")]
    policy: PolicyOption = None
    kv_cache: Annotated[
        Literal["fp8", "none"],
        option(
            "fp8: declare an FP8 KV cache (a cast, no scales). none: let the engine decide.",
            group="Scales",
        ),
    ] = "fp8"
    input_scales: Annotated[
        str,
        option(
            "Activation scales: `one` for 1.0 everywhere, or the file written by "
            "`trtspec calibrate`.",
            group="Scales",
        ),
    ] = "one"
    weight_scales: Annotated[
        Literal["max", "mse"] | None,
        option(
            "Block scales. max: of each block's maximum. mse: of least squared error, "
            "ModelOpt's fp8_scale_sweep.",
            default="the policy's",
            group="Scales",
        ),
    ] = None
    workers: Annotated[int, option("Threads; 0 starts one per core.", min=0, group="Run")] = 0
    device: Annotated[
        str,
        option("cpu, cuda or cuda:N. A GPU writes the same bytes, faster.", group="Run"),
    ] = "cpu"
    engine: Annotated[
        Literal["stream", "modelopt"],
        option(
            "Who packs a linear. stream: this package. modelopt: ModelOpt's own class, to the same "
            "bytes, slower.",
            group="Run",
        ),
    ] = "stream"
    json_: JsonOption = False


def quantize(options: QuantizeOptions) -> Result:
    """Convert BF16, FP8-block or INT4 weights to NVFP4, keeping the names and files of the hub.

    Works shard by shard in bounded memory. After an interruption, the same command resumes.

    The bytes equal ModelOpt's export for the same scales.
    """
    from trtspec.checkpoint.hub import find, resolve
    from trtspec.checkpoint.published import known_target
    from trtspec.formats import WeightFormat
    from trtspec.quant.conversion_plan import ConversionOptions, refuse_fp4
    from trtspec.quant.policy import load_policy
    from trtspec.quant.run import QuantizePlan, quantize_checkpoint, to_json

    check_device(options.device)
    record = known_target(options.source)
    if record:
        # a published NVFP4 checkpoint is refused before its download
        refuse_fp4(record.id, WeightFormat(record.format))
    # a dry run needs only headers; `find` reads them from the hub and downloads no weights
    locate = find if options.dry_run else resolve
    source = locate(options.source).checkpoint
    policy = load_policy(options.policy) if options.policy else None
    kv_cache = None if options.kv_cache == "none" else options.kv_cache
    input_scales = None if options.input_scales == "one" else Path(options.input_scales)
    settings = fill(
        ConversionOptions,
        options,
        kv_cache=kv_cache,
        input_scales=input_scales,
        by_modelopt=options.engine != "stream",
    )
    with progress_bar("quantizing") as bar:
        result = quantize_checkpoint(source, options.output, policy, settings, options, bar)
    if isinstance(result, QuantizePlan):
        return Result(to_json(result), tables=[value_table(to_json(result))])
    rows = [
        (name, f"{entry.tensors:,}", f"{entry.relative_error:.4f}", f"{entry.zero_blocks:,}")
        for name, entry in result.classes.items()
    ]
    table = Table("", ("linears", "tensors", "relative error", "zero blocks"), rows, ruled=False)
    message = f"{result.output} is complete, and {options.source} has errors, each with its remedy"
    failure = check_failure(message, result.problems)
    lines = [
        "",
        f"{result.output}: {result.quantized:,} NVFP4, {result.decoded:,} decoded, "
        f"{result.copied:,} unchanged; "
        f"{result.bytes_in:,} -> {result.bytes_out:,} bytes in {result.seconds} s, "
        f"{result.shards_resumed} shards resumed",
        next_command("inspect", result.output, "--against", options.source),
    ]
    tables = [table] if rows else []
    return Result(to_json(result), result.problems, tables, lines, failure)
