"""Defines `trtspec calibrate`, which measures activation scales for `quantize --input-scales`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from trtspec.machine import check_device
from trtspec.records import JsonOption, argument, fill, option
from trtspec.report import Result, next_command, progress_bar, value_table
from trtspec.verbs.options import OutputFlags, PolicyOption, SourceArgument


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(OutputFlags):
    """Options of `trtspec calibrate`."""

    source: SourceArgument
    data: Annotated[
        Path, argument("Texts: JSON lines with text, messages or prompts, or a directory of these.")
    ]
    output: Annotated[Path, option("Safetensors file for the input scales.", "-o")]
    samples: Annotated[int, option("Number of texts to run, from the start of DATA.", min=1)] = 512
    seq_len: Annotated[int, option("Truncate each text to this many tokens.", min=2)] = 512
    policy: PolicyOption = None
    device: Annotated[str, option("cpu or cuda.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        option(
            "Compute type. auto: bfloat16 where the device multiplies it natively, else float32."
        ),
    ] = "auto"
    json_: JsonOption = False


def calibrate(options: CalibrateOptions) -> Result:
    """Measure activation scales with ModelOpt's quantizers, one decoder layer in memory at a time.

    Texts are processed layer by layer, so one machine calibrates a model of any size. An
    interrupted run resumes with the layer it stopped in. Use the result with `trtspec quantize SRC
    -o OUT --input-scales FILE`.
    """
    from trtspec.checkpoint.hub import resolve
    from trtspec.verbs.doctor import require

    require("calibrate")
    check_device(options.device)
    path = resolve(options.source).directory
    import torch  # after the checks, because the import takes seconds

    from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint
    from trtspec.quant.policy import load_policy

    policy = load_policy(options.policy) if options.policy else None
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    settings = fill(CalibrationOptions, options, dtype=dtype)
    with progress_bar("calibrating", unit="layers") as bar:
        result = calibrate_checkpoint(
            path, options.data, options.output, policy, settings, options, bar
        )
    values = {name: value for name, value in asdict(result).items() if value is not None}
    scales = ("-o", "OUT", "--policy", result.policy, "--input-scales", result.output)
    messages = [] if options.dry_run else [next_command("quantize", options.source, *scales)]
    return Result(values, tables=[value_table(values)], messages=messages)
