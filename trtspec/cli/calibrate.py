"""`trtspec calibrate`: activation scales for `quantize --input-scales`, one decoder layer in memory at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from trtspec.cli.options import PolicyOption, SourceArgument, directory_of, policy_of
from trtspec.records import DryRunOption, ForceOption, JsonOption, RestartOption, argument, option
from trtspec.report import OutputOptions, Result, progress_bar, value_table


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    source: SourceArgument
    data: Annotated[Path, argument("Texts: jsonl with text, messages or prompts, or plain text lines.")]
    output: Annotated[Path, option("Safetensors file for the input scales.", "-o")]
    samples: Annotated[int, option("Number of texts to run, from the start of DATA.", min=1)] = 512
    seq_len: Annotated[int, option("Truncate each text to this many tokens.", min=2)] = 512
    policy: PolicyOption = None
    device: Annotated[str, option("cpu or cuda.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        option("Compute type. auto: bfloat16 where the device multiplies it natively, else float32."),
    ] = "auto"
    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False
    json_: JsonOption = False


def calibrate(options: CalibrateOptions) -> Result:
    """Measure activation scales with ModelOpt's quantizers, one decoder layer in memory at a time.

    Texts are processed layer by layer, so one machine calibrates a model of any size. An interrupted run resumes with
    the layer it stopped in. Use the result with `trtspec quantize SRC -o OUT --input-scales FILE`.
    """
    path = directory_of(options.source)
    import torch  # only now: it takes seconds

    from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint

    policy = policy_of(options.policy, options.source, path)
    chosen = CalibrationOptions(
        samples=options.samples,
        seq_len=options.seq_len,
        device=options.device,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
    )
    again = OutputOptions(options.dry_run, options.restart, options.force)
    with progress_bar("calibrating", unit="layers") as bar:
        result = calibrate_checkpoint(path, options.data, options.output, policy, chosen, again, bar.show)
    values = {name: value for name, value in asdict(result).items() if value is not None}
    then = f"next: trtspec quantize {options.source} -o OUT --policy {result.policy} --input-scales {result.output}"
    return Result(values, tables=[value_table(values)], messages=[] if options.dry_run else [then])
