"""`trtspec quantize`: a BF16, FP8-block or INT4 Kimi checkpoint to NVFP4."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtspec.cli import quantize_options as opt
from trtspec.cli.options import DryRunOption, ForceOption, JsonOption, PolicyOption, SourceArgument
from trtspec.cli.progress import progress
from trtspec.cli.values import policy_of, source_directory
from trtspec.errors import UsageError

if TYPE_CHECKING:
    pass


def quantize(
    source: SourceArgument,
    output: opt.OutputOption,
    policy: PolicyOption = None,
    kv_cache: opt.KvCacheOption = "fp8",
    input_scales: opt.InputScalesOption = "one",
    weight_scales: opt.WeightScalesOption = "max",
    workers: opt.WorkersOption = 0,
    device: opt.DeviceOption = "cpu",
    shard: opt.ShardOption = None,
    merge: opt.MergeOption = False,
    engine: opt.EngineOption = "stream",
    dry_run: DryRunOption = False,
    restart: opt.RestartOption = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Convert BF16, FP8-block or INT4 weights to NVFP4, keeping the hub's names and files.

    Works shard by shard in bounded memory, and continues after a kill when it is run again.

    The bytes equal those of ModelOpt's export for the same scales.
    """
    from trtspec.report import print_json

    _check_choice("--kv-cache", kv_cache, ("fp8", "none"))
    _check_choice("--engine", engine, ("stream", "modelopt"))
    _check_choice("--weight-scales", weight_scales, ("max", "mse"))
    special = _special(engine, weight_scales, device, shard, merge)
    path = source_directory(source)
    chosen = policy_of(policy, source, path)
    convert: Callable[..., dict[str, Any]] = _engine(engine)
    with progress("quantizing") as show:
        result = convert(
            path,
            output,
            chosen,
            kv_cache=None if kv_cache == "none" else kv_cache,
            input_scales=None if input_scales == "one" else Path(input_scales),
            workers=workers,
            dry_run=dry_run,
            restart=restart,
            force=force,
            progress=show,
            **special,
        )
    if json_output:
        print_json(result)
    else:
        _show(result)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{option} {value} is not one of {', '.join(choices)}", "see `trtspec quantize --help`")


def _special(engine: str, weight_scales: str, device: str, shard: str | None, merge: bool) -> dict[str, Any]:
    """What only the streaming engine can do; nothing for the other, or a UsageError."""
    from trtspec.quant.parts import parse_part

    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"--device {device} is not one of cpu, cuda, cuda:N", "see `trtspec quantize --help`")
    if shard is not None and merge:
        raise UsageError("--shard and --merge exclude each other", "--merge comes once all parts are done")
    special = {"weight_scales": weight_scales, "device": device, "part": shard and parse_part(shard), "merge": merge}
    if engine == "stream":
        return special
    if special != {"weight_scales": "max", "device": "cpu", "part": None, "merge": False}:
        raise UsageError(
            "--weight-scales mse, --device, --shard and --merge belong to the streaming engine", "use --engine stream"
        )
    return {}


def _engine(name: str) -> Callable[..., dict[str, Any]]:
    if name == "modelopt":
        from trtspec.quant.modelopt import quantize_with_modelopt

        return quantize_with_modelopt
    from trtspec.quant.streaming import quantize_checkpoint

    return quantize_checkpoint


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if result.get("dry_run"):
        counts = ", ".join(f"{count:,} {name}" for name, count in result["tensors_by_class"].items())
        console.print(f"would write {result['output']} with policy {result['policy']}", soft_wrap=True)
        console.print(f"NVFP4: {counts}", soft_wrap=True)
        console.print(f"decoded to BF16: {result['decoded']:,}; unchanged: {result['copied']:,}")
        console.print(f"{result['bytes_in']:,} bytes in, {result['bytes_out']:,} out, {result['free_bytes']:,} free")
        console.print(f"packing takes about {result['packing_seconds_estimate']} s with {result['workers']} workers")
        return
    table = Table("linears", "tensors", "relative error", "zero blocks", box=None, pad_edge=False)
    for name, entry in result["classes"].items():
        table.add_row(name, f"{entry['tensors']:,}", f"{entry['relative_error']:.4f}", f"{entry['zero_blocks']:,}")
    console.print(table)
    console.print(
        f"\n{result['output']}: {result['quantized']:,} NVFP4, {result['decoded']:,} decoded, "
        f"{result['copied']:,} unchanged; {result['bytes_in']:,} -> {result['bytes_out']:,} bytes "
        f"in {result['seconds']} s, {result['shards_resumed']} shards resumed",
        soft_wrap=True,
    )
    if result["part"] not in (None, "merge"):
        console.print(
            f"part {result['part']} is done; once all are: trtspec quantize SRC -o {result['output']} --merge"
        )
        return
    if result["zero_tensors"]:
        console.print(f"entirely zero: {', '.join(result['zero_tensors'])}", soft_wrap=True)
    console.print(f"next: trtspec inspect {result['output']} --against SRC", soft_wrap=True, markup=False)
