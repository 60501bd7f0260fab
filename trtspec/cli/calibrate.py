"""`trtspec calibrate`: activation scales for `quantize --input-scales`, one decoder layer in memory at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trtspec.cli.options import PolicyOption, SourceArgument, policy_of, source_directory
from trtspec.records import DryRunOption, ForceOption, JsonOption, RestartOption

if TYPE_CHECKING:
    from trtspec.calibrate import Calibrated, CalibrationPlan

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    source: SourceArgument
    data: Annotated[Path, typer.Argument(help="Texts: jsonl with text, messages or prompts, or plain text lines.")]
    output: Annotated[Path, typer.Option("--output", "-o", help="Safetensors file for the input scales.")]
    samples: Annotated[int, typer.Option(min=1, help="Number of texts to run, from the start of DATA.")] = 512
    seq_len: Annotated[int, typer.Option(min=2, help="Truncate each text to this many tokens.")] = 512
    policy: PolicyOption = None
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Compute type. auto: bfloat16 where the device multiplies it natively, else float32."),
    ] = "auto"
    states_memory: Annotated[
        float | None,
        typer.Option(min=0, help="GiB of hidden states to keep in memory.", show_default="half of the free memory"),
    ] = None
    load_ahead: Annotated[
        bool | None,
        typer.Option(
            "--load-ahead/--one-layer",
            help="Prefetch the next layer while the current one runs (needs memory for two layers).",
            show_default="prefetch where four layers fit",
        ),
    ] = None
    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False
    json_: JsonOption = False


def calibrate(options: CalibrateOptions) -> None:
    """Measure activation scales with ModelOpt's quantizers, one decoder layer in memory at a time.

    Texts are processed layer by layer, so one machine calibrates a model of any size. An interrupted run resumes with
    the layer it stopped in. Use the result with `trtspec quantize SRC -o OUT --input-scales FILE`.
    """
    from trtspec.report import OutputOptions, print_json

    path = source_directory(options.source)
    import torch  # only now: it takes seconds

    from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint
    from trtspec.report import progress_bar

    policy = policy_of(options.policy, options.source, path)
    chosen = CalibrationOptions(
        samples=options.samples,
        seq_len=options.seq_len,
        device=options.device,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        states_budget=None if options.states_memory is None else options.states_memory * GIB,
        load_ahead=options.load_ahead,
    )
    again = OutputOptions(options.dry_run, options.restart, options.force)
    with progress_bar("calibrating", unit="layers") as bar:
        result = calibrate_checkpoint(path, options.data, options.output, policy, chosen, again, bar.show)
    if options.json_:
        print_json(asdict(result))
    else:
        _show(result, options.source)


def _show(result: Calibrated | CalibrationPlan, source: str) -> None:
    from trtspec.calibrate import CalibrationPlan

    print(f"texts     {result.texts:,}, {result.tokens:,} tokens, computed in {result.dtype}")
    print(f"linears   {result.linears:,} under policy {result.policy}, {result.layers} layers")
    if isinstance(result, CalibrationPlan):
        states = "in memory" if result.states_in_memory else "on disk"
        layers = "two layers" if result.load_ahead else "one layer"
        print(f"memory    about {result.memory_bytes_estimate:,} bytes: {layers} of {result.layer_bytes:,}")
        print(f"states    {result.states_bytes:,} bytes, {states}; {result.disk_bytes:,} bytes of disk needed")
        print(f"reads     {result.bytes_read:,} bytes once; would write {result.output}")
        return
    scale = result.input_scale
    print(f"scales    {scale['min']:.3g} to {scale['max']:.3g}, median {scale['median']:.3g}")
    if result.experts:
        print(f"experts   {result.experts_unreached:,} of {result.experts:,} reached by no token")
    if result.experts_unreached:
        print("          they have their layer's scale, which all experts of a layer share; more --samples reach more")
    for place in result.dead_inputs:
        print(f"warning   {place}: its input was always zero; the scale is ModelOpt's substitute")
    resumed = f", {result.layers_resumed} layers resumed" if result.layers_resumed else ""
    print(f"took      {result.seconds:.0f} s{resumed}, peak memory {result.peak_rss_bytes:,} bytes")
    print(f"next: trtspec quantize {source} -o OUT --policy {result.policy} --input-scales {result.output}")
