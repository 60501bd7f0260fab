"""`trtspec calibrate`: activation scales for `quantize --input-scales`, one decoder layer in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption, PolicyOption, SourceArgument
from trtspec.cli.progress import progress
from trtspec.cli.values import policy_of, source_directory

GIB = 2**30


def calibrate(
    source: SourceArgument,
    data: Annotated[Path, typer.Argument(help="Texts: jsonl of text, messages or prompts, or plain text lines.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file of input scales.")],
    samples: Annotated[int, typer.Option(min=1, help="Texts to run, from the beginning of DATA.")] = 512,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens at which a text is cut.")] = 512,
    policy: PolicyOption = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Compute type; auto: bfloat16 where the device multiplies it natively."),
    ] = "auto",
    states_memory: Annotated[
        float | None, typer.Option(min=0, help="GiB of hidden states kept in memory [half of what is free].")
    ] = None,
    load_ahead: Annotated[
        bool | None,
        typer.Option(
            "--load-ahead/--one-layer",
            help="Decode the next layer while one computes, in the memory of both [where four layers fit].",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an interrupted run, begin anew.")] = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Measure activation scales with ModelOpt's quantizers, one decoder layer in memory at a time.

    The texts pass one layer after the other, so a model of any size is calibrated on one machine; a killed run goes on
    with the layer that it stopped in. Pass the file on: `trtspec quantize SRC -o OUT --input-scales FILE`.
    """
    from trtspec.report import print_json

    path = source_directory(source)
    import torch  # only now: it takes seconds

    from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint

    chosen = policy_of(policy, source, path)
    options = CalibrationOptions(
        samples=samples,
        seq_len=seq_len,
        device=device,
        dtype=None if dtype == "auto" else getattr(torch, dtype),
        states_budget=None if states_memory is None else states_memory * GIB,
        load_ahead=load_ahead,
    )
    with progress("calibrating", "layers") as show:
        result = calibrate_checkpoint(
            path, data, output, chosen, options, dry_run=dry_run, restart=restart, force=force, progress=show
        )
    if json_output:
        print_json(result)
    else:
        _show(result, source)


def _show(result: dict[str, Any], source: str) -> None:
    print(f"texts     {result['texts']:,}, {result['tokens']:,} tokens, computed in {result['dtype']}")
    print(f"linears   {result['linears']:,} under policy {result['policy']}, {result['layers']} layers")
    if result.get("dry_run"):
        states = "in memory" if result["states_in_memory"] else "on disk"
        layers = "two layers" if result["load_ahead"] else "one layer"
        print(f"memory    about {result['memory_bytes_estimate']:,} bytes: {layers} of {result['layer_bytes']:,}")
        print(f"states    {result['states_bytes']:,} bytes, {states}; {result['disk_bytes']:,} bytes of disk needed")
        print(f"reads     {result['bytes_read']:,} bytes once; would write {result['output']}")
        return
    scale = result["input_scale"]
    print(f"scales    {scale['min']:.3g} to {scale['max']:.3g}, median {scale['median']:.3g}")
    if result["experts"]:
        print(f"experts   {result['experts_unreached']:,} of {result['experts']:,} reached by no token")
    if result["experts_unreached"]:
        print("          they have their layer's scale, which all experts of a layer share; more --samples reach more")
    for place in result["dead_inputs"]:
        print(f"warning   {place}: its input was always zero; the scale is ModelOpt's substitute")
    resumed = f", {result['layers_resumed']} layers resumed" if result["layers_resumed"] else ""
    print(f"took      {result['seconds']:.0f} s{resumed}, peak memory {result['peak_rss_bytes']:,} bytes")
    print(f"next: trtspec quantize {source} -o OUT --policy {result['policy']} --input-scales {result['output']}")
