"""BF16, FP8-block or INT4 Kimi checkpoint -> NVFP4, shard by shard, in bounded memory, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trtspec import machine
from trtspec.checkpoint.headers import Checkpoint, ShardReader
from trtspec.checkpoint.identity import identity
from trtspec.checkpoint.writer import Journal, header_of, refuse_changed, write_index
from trtspec.errors import UsageError
from trtspec.quant.conversion import (
    Conversion,
    ConversionOptions,
    LinearErrors,
    Quantized,
    QuantizePlan,
    estimate,
    prepare,
)
from trtspec.quant.native import choose_packer
from trtspec.quant.output import (
    JOURNAL_NAME,
    carry_files,
    check_output,
    claim_output,
    clear_output,
    disk_errors,
    model_card,
    publication,
    write_card,
    write_configs,
)
from trtspec.quant.plan import ShardPlan
from trtspec.quant.policy import KV_CACHES, WEIGHT_SCALES, Policy, source_name
from trtspec.quant.shard import ERROR_ROWS, ShardConverter
from trtspec.quant.workers import Job, convert_all, worker_count
from trtspec.report import OutputOptions, file_sha256, peak_rss, provenance, say, write_json

Progress = Callable[[int, int], None]


def quantize_checkpoint(
    source: Path | Checkpoint,
    output: Path,
    policy: Policy,
    options: ConversionOptions | None = None,
    again: OutputOptions | None = None,
    progress: Progress | None = None,
) -> Quantized | QuantizePlan:
    """Converts `source` to `output`; with `again.dry_run` it only says what it would do.

    Run again after a kill it continues: shards whose size and checksum are in the journal are kept as they are.
    `progress` is called with source bytes done and in all. Raises TrtspecError or UsageError before the first byte for
    everything that headers, options, disk and permissions can tell.
    """
    start = time.monotonic()
    options, again = options or ConversionOptions(), again or OutputOptions()
    conversion = prepare(source, output, policy, options)
    choose_packer(conversion.weight_scales, options.device)  # a missing device is reported before anything is written
    if options.by_modelopt:
        from trtspec.quant import modelopt  # only now: it imports torch

        modelopt.check_engine(conversion)
        if (output / JOURNAL_NAME).exists() and not again.restart:
            raise UsageError(f"{output} holds an earlier conversion, which this engine cannot resume", "pass --restart")
        options, again = replace(options, workers=1), replace(again, restart=True)
    if again.dry_run:
        resumes = check_output(conversion, restart=again.restart, force=again.force)
        if resumes and (begun := header_of(output / JOURNAL_NAME)):
            refuse_changed(output / JOURNAL_NAME, begun, _header(conversion, options.by_modelopt))
        hub = conversion.checkpoint.remote
        planned = estimate(conversion, options.workers)
        return replace(planned, device=options.device, resumes=resumes, hub=hub.to_dict() if hub else None)
    header = _header(conversion, options.by_modelopt)
    fresh = claim_output(conversion, restart=again.restart, force=again.force)
    with disk_errors(output), Journal(output / JOURNAL_NAME, header, restart=again.restart) as journal:
        clear_output(conversion, fresh)
        kept = _verified(conversion, journal.done)
        _check_source(conversion, journal, kept)
        resumed = _convert(conversion, journal, kept, options.workers, options.device, progress)
        records = {plan.shard: journal.done[plan.shard] for plan in conversion.plans}
        if options.by_modelopt:
            modelopt.replace_linears(conversion)
            for shard, record in records.items():
                record["sha256"] = file_sha256(output / shard)
        result = summarize(conversion, records)
        finish(conversion, records, result, header)
    return replace(
        result,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=max(peak_rss(), *(record.get("worker_peak_rss_bytes", 0) for record in records.values())),
        shards_resumed=resumed,
    )


def _header(conversion: Conversion, by_modelopt: bool) -> dict[str, Any]:
    """What the journal is begun with: all that decides the bytes."""
    header = {"source": identity(conversion.checkpoint), "options": conversion.options}
    return header | {"engine": "modelopt"} if by_modelopt else header


def _verified(conversion: Conversion, done: dict[str, dict[str, Any]]) -> set[str]:
    """Shards that need no work: recorded, present, of the recorded size and content. Read by one thread per core."""

    def is_whole(shard: str) -> bool:
        record, path = done.get(shard), conversion.output / shard
        present = record is not None and path.is_file() and path.stat().st_size == record["bytes"]
        return present and record is not None and file_sha256(path) == record["sha256"]

    shards = [plan.shard for plan in conversion.plans]
    with ThreadPoolExecutor(machine.cores()) as pool:
        return {shard for shard, whole in zip(shards, pool.map(is_whole, shards), strict=True) if whole}


def _check_source(conversion: Conversion, journal: Journal, kept: set[str]) -> None:
    """Shards that were converted from files with other times than now are kept if the content is the same.

    Raises UsageError naming the first for which it is not.
    """
    times = _times(conversion)
    todo = [plan for plan in conversion.plans if plan.shard in kept and _changed(journal.done[plan.shard], plan, times)]
    if not todo:
        return
    say(f"reading the source of {len(todo)} finished shards again: its files have other times than when they were read")
    converter = ShardConverter(ShardReader(conversion.checkpoint.path), choose_packer(conversion.weight_scales))
    try:
        for plan in todo:
            record = journal.done[plan.shard]
            if converter.source_digest(plan) != record["read"]:
                names = ", ".join(plan.sources)
                text = f"{plan.shard} was converted from something else than {names} of the source now hold"
                raise UsageError(text, "pass --restart to start over")
            fields = {name: value for name, value in record.items() if name != "key"}
            journal.record(plan.shard, **fields | {"times": {name: times[name] for name in plan.sources}})
    finally:
        converter.close()


def _times(conversion: Conversion) -> dict[str, int]:
    """Modification times of the source's shard files, in nanoseconds."""
    source = conversion.checkpoint.path
    return {name: (source / name).stat().st_mtime_ns for name in conversion.checkpoint.shards}


def _changed(record: dict[str, Any], plan: ShardPlan, times: dict[str, int]) -> bool:
    return bool(record.get("times") != {name: times[name] for name in plan.sources})


def _convert(
    conversion: Conversion, journal: Journal, kept: set[str], workers: int, device: str, progress: Progress | None
) -> int:
    """Converts what is not kept, recording each shard; returns how many were kept."""
    todo = [plan for plan in conversion.plans if plan.shard not in kept]
    done = conversion.bytes_in - sum(plan.bytes_in for plan in todo)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, conversion.bytes_in)

    advance(0)
    times = _times(conversion)  # before anything is read
    job = Job(conversion.checkpoint.path, conversion.output, conversion.weight_scales, device)
    if todo:
        for plan, record in convert_all(job, todo, worker_count(workers, todo), advance):
            journal.record(plan.shard, **record, times={name: times[name] for name in plan.sources})
    return len(kept)


def summarize(conversion: Conversion, records: dict[str, dict[str, Any]]) -> Quantized:
    """The counts and errors of all shards, from their journal records."""
    classes: dict[str, dict[str, float]] = {}
    for record in records.values():
        for name, entry in record["classes"].items():
            total = classes.setdefault(name, dict.fromkeys(entry, 0))
            for key, value in entry.items():
                total[key] += value
    summary = {
        name: LinearErrors(
            tensors=int(entry["tensors"]),
            relative_error=round((entry["error"] / entry["norm"]) ** 0.5 if entry["norm"] else 0.0, 6),
            zero_blocks=int(entry["zero_blocks"]),
        )
        for name, entry in sorted(classes.items())
    }
    return Quantized(
        output=str(conversion.output),
        policy=conversion.policy.name,
        weight_scales=conversion.weight_scales,
        deviations=conversion.deviations,
        quantized=sum(record["quantized"] for record in records.values()),
        decoded=sum(record["decoded"] for record in records.values()),
        copied=sum(record["copied"] for record in records.values()),
        bytes_in=conversion.bytes_in,
        bytes_out=conversion.bytes_out,
        classes=summary,
        zero_tensors=sorted(name for record in records.values() for name in record["zero_tensors"]),
    )


def finish(
    conversion: Conversion, records: dict[str, dict[str, Any]], result: Quantized, header: dict[str, Any]
) -> None:
    """Index, carried files, card, provenance, then the configs that make the directory a checkpoint."""
    output, source = conversion.output, conversion.checkpoint.path
    exclude = conversion.policy.exclude_patterns(conversion.spec)
    shards = [plan.shard for plan in conversion.plans]
    if shards != ["model.safetensors"]:
        weight_map = {name: plan.shard for plan in conversion.plans for name in plan.layout()}
        write_index(output, weight_map, conversion.bytes_out)
    carried = carry_files(source, output)
    write_card(output, _card(conversion, result))
    written = {shard: records[shard]["sha256"] for shard in shards}
    origin = {"path": str(source), **header["source"]}
    more = {"shards": written, "carried": carried, "classes": asdict(result)["classes"]}
    write_json(output / "provenance.json", provenance("quantize", origin, conversion.options, **more))
    write_configs(output, conversion.checkpoint.config, exclude, conversion.kv_cache)


def _card(conversion: Conversion, result: Quantized) -> str:
    spec, policy = conversion.spec, conversion.policy
    name = source_name(conversion.checkpoint.path)
    facts = {
        "base": name,
        "title": name.rpartition("/")[2],
        "output": conversion.output.name,
        "policy": policy.name,
        "summary": policy.summary,
        "quantized": result.quantized,
        "copied": result.copied,
        "decoded": result.decoded,
        "kv": KV_CACHES[conversion.kv_cache or "none"],
        "published": publication(policy, conversion.deviations),
        "scales": conversion.scales.description,
        "weight_scales": WEIGHT_SCALES[conversion.weight_scales],
        "size": f"{result.bytes_out:,}",
        "size_in": f"{result.bytes_in:,}",
        "format": spec.quant.format.upper(),
        "rows": ERROR_ROWS,
    }
    return model_card(spec, facts, result.classes, result.zero_tensors)
